"""A topological order of a graph with narrow cuts, which becomes the chain of layers.

The bytes that live at each position, summed over the positions, are the sum of the cut widths.
Finding the order of least sum is hard in general (directed optimal linear arrangement; Garey and
Johnson 1979, GT43), so some cheap orders are made, and the narrowest is improved by a local search.

Local search over topological orders: one node at a time moves to where the cuts are narrowest.

A move is a row of exchanges of neighbours. An exchange changes one cut only, so that its gain takes
a look at the two nodes' tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from planner.interop.importing.imported import ImportedTensor

MOST_EXCHANGES = 300_000


class OrderMoves:
    """A topological order and its cuts, edited in place.

    Args:
        order: every node once, producers before users.
        tensors: what the nodes hand on.
        budget: exchanges that may be tried; the search ends when they are used up.
    """

    def __init__(
        self, order: Sequence[str], tensors: Sequence[ImportedTensor], budget: int = MOST_EXCHANGES
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


class LeastGrowth:
    """A rule that takes the ready node after which the fewest bytes are live.

    Of equals the one that can run since last, so that a branch is finished before the next one
    starts; then the first of ``nodes``.

    Args:
        nodes: every node once.
        tensors: acyclic.
        eager: whether nodes without inputs compete from the start; otherwise they wait until no
            other node can run.
    """

    def __init__(
        self, nodes: Sequence[str], tensors: Sequence[ImportedTensor], *, eager: bool
    ) -> None:
        self._nodes = nodes
        self._tensors = tensors
        self._eager = eager
        self._rank = {name: index for index, name in enumerate(nodes)}
        self._made: dict[str, list[ImportedTensor]] = {name: [] for name in nodes}
        self._read: dict[str, list[int]] = {name: [] for name in nodes}
        for index, tensor in enumerate(tensors):
            self._made[tensor.producer].append(tensor)
            for user in tensor.users:
                self._read[user].append(index)
        self._inputs_missing = {name: len(read) for name, read in self._read.items()}
        self._users_left = [len(tensor.users) for tensor in tensors]
        self._heap: list[tuple[bool, int, int, int, str]] = []
        self._done: dict[str, None] = {}

    def order(self) -> tuple[str, ...]:
        """The order; to be asked for once."""
        for name in self._nodes:
            if not self._inputs_missing[name]:
                self._offer(name)
        while self._heap:
            name = heappop(self._heap)[-1]
            if name not in self._done:  # Offered again since, at a better price.
                self._run(name)
        return tuple(self._done)

    def _run(self, name: str) -> None:
        self._done[name] = None
        for index in self._read[name]:
            self._users_left[index] -= 1
            if self._users_left[index] == 1:
                self._offer_again(index)
        for tensor in self._made[name]:
            for user in tensor.users:
                self._inputs_missing[user] -= 1
                if not self._inputs_missing[user]:
                    self._offer(user)

    def _offer_again(self, index: int) -> None:
        """The last user of a tensor has become cheaper: it ends the tensor's life."""
        last = next(user for user in self._tensors[index].users if user not in self._done)
        if not self._inputs_missing[last]:
            self._offer(last)

    def _offer(self, name: str) -> None:
        waits = not self._eager and not self._read[name]
        row = (waits, self._growth(name), -len(self._done), self._rank[name], name)
        heappush(self._heap, row)

    def _growth(self, name: str) -> int:
        made = sum(tensor.bytes for tensor in self._made[name])
        ended = (i for i in self._read[name] if self._users_left[i] == 1)
        return made - sum(self._tensors[index].bytes for index in ended)


@dataclass(frozen=True)
class NarrowOrder:
    """Looks for an order of ``nodes`` in which every tensor is made before it is used.

    Attributes:
        nodes: in the order that decides between equals.
        tensors: acyclic.
    """

    nodes: Sequence[str]
    tensors: Sequence[ImportedTensor]

    def find(self) -> tuple[str, ...]:
        """The narrowest of the orders tried, of equal ones the first, improved."""
        orders = [
            LeastGrowth(self.nodes, self.tensors, eager=eager).order() for eager in (True, False)
        ]
        if self._is_executable(self.nodes):
            orders.insert(0, tuple(self.nodes))
        narrowest = min(orders, key=lambda order: sum(self.cut_bytes(order)))
        return OrderMoves(narrowest, self.tensors).improve()

    def cut_bytes(self, order: Sequence[str]) -> list[int]:
        """Bytes that live between each node of an order and the next."""
        position = {name: index for index, name in enumerate(order)}
        change = [0] * (len(order) + 1)
        for tensor in self.tensors:
            change[position[tensor.producer]] += tensor.bytes
            change[max(position[user] for user in tensor.users)] -= tensor.bytes
        return list(accumulate(change))[: len(order) - 1]

    def _is_executable(self, order: Sequence[str]) -> bool:
        position = {name: index for index, name in enumerate(order)}
        return all(
            position[tensor.producer] < position[user]
            for tensor in self.tensors
            for user in tensor.users
        )
