"""A greedy topological order: always the node after which the fewest bytes live."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from planner.importing.tensor import Tensor


class LeastGrowth:
    """Of the nodes that can run, takes the one after which the fewest bytes live.

    Of equals the one that can run since last, so that a branch is finished before the next one
    starts; then the first of ``nodes``.

    Args:
        nodes: every node once.
        tensors: acyclic.
        eager: whether nodes without inputs compete from the start; otherwise they wait until no
            other node can run.
    """

    def __init__(self, nodes: Sequence[str], tensors: Sequence[Tensor], *, eager: bool) -> None:
        self._nodes = nodes
        self._tensors = tensors
        self._eager = eager
        self._rank = {name: index for index, name in enumerate(nodes)}
        self._made: dict[str, list[Tensor]] = {name: [] for name in nodes}
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
