"""Local search over topological orders: one node at a time moves to where the cuts are narrowest.

A move is a row of exchanges of neighbours. An exchange changes one cut only, so that its gain takes
a look at the two nodes' tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.importing.tensor import Tensor

MOST_EXCHANGES = 300_000


class OrderMoves:
    """A topological order and its cuts, edited in place.

    Args:
        order: every node once, producers before users.
        tensors: what the nodes hand on.
        budget: exchanges that may be tried; the search ends when they are used up.
    """

    def __init__(
        self, order: Sequence[str], tensors: Sequence[Tensor], budget: int = MOST_EXCHANGES
    ) -> None:
        self.order = list(order)
        self.budget = budget
        self._bytes = [tensor.bytes for tensor in tensors]
        self._made_bytes = dict.fromkeys(order, 0)
        self._read: dict[str, set[int]] = {name: set() for name in order}
        self._before: dict[str, set[str]] = {name: set() for name in order}
        self._position = {name: index for index, name in enumerate(order)}
        for index, tensor in enumerate(tensors):
            self._made_bytes[tensor.producer] += tensor.bytes
            for user in tensor.users:
                self._read[user].add(index)
                self._before[user].add(tensor.producer)
        self._last = [max(map(self._position.__getitem__, tensor.users)) for tensor in tensors]
        self._cut = self._cuts()

    def _cuts(self) -> list[int]:
        """Bytes alive behind each position; one more for the place before the first."""
        cuts, alive = [], 0
        for index, name in enumerate(self.order):
            ended = sum(self._bytes[t] for t in self._read[name] if self._last[t] == index)
            alive += self._made_bytes[name] - ended
            cuts.append(alive)
        return [*cuts, 0]

    def improve(self) -> tuple[str, ...]:
        """Move nodes until no move of a single one narrows the sum of the cuts."""
        improved = True
        while improved and self.budget > 0:
            improved = False
            for name in tuple(self.order):
                improved |= self._move(self._position[name])
        return tuple(self.order)

    def _move(self, index: int) -> bool:
        """Move one node to the best place within reach; whether it moved."""
        best, best_change = index, 0
        for step in (1, -1):
            here, change = index, 0
            while self._can_exchange(here, step) and self.budget > 0:
                change += self._exchange(min(here, here + step))
                here += step
                if change < best_change:
                    best, best_change = here, change
            self._bring(here, index)
        self._bring(index, best)
        return best != index

    def _bring(self, index: int, target: int) -> None:
        """Move a node to a place that it has been to."""
        while index != target:
            step = 1 if target > index else -1
            self._exchange(min(index, index + step))
            index += step

    def _can_exchange(self, index: int, step: int) -> bool:
        if not 0 <= index + step < len(self.order):
            return False
        first, second = sorted((index, index + step))
        return self.order[first] not in self._before[self.order[second]]

    def _exchange(self, index: int) -> int:
        """Exchange the nodes at ``index`` and behind it; the change of the sum of the cuts."""
        self.budget -= 1
        first, second = self.order[index], self.order[index + 1]
        read_first, read_second = self._read[first], self._read[second]
        ended = 0
        for tensor in read_second - read_first:
            if self._last[tensor] == index + 1:
                self._last[tensor] = index
                ended += self._bytes[tensor]
        for tensor in read_first - read_second:
            if self._last[tensor] == index:
                self._last[tensor] = index + 1
        self.order[index], self.order[index + 1] = second, first
        self._position[second], self._position[first] = index, index + 1
        old = self._cut[index]
        self._cut[index] = self._cut[index - 1] + self._made_bytes[second] - ended
        return self._cut[index] - old
