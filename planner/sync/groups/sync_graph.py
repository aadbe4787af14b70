"""Which workers the groups of a while have connected: a union-find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SyncGraph:
    """Components of workers that groups have joined.

    A component of which all have left counts no more; what one that has left joined stays joined.

    Attributes:
        components: how many there are with somebody who is there.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.components = 0
        self._node: dict[int, int] = {}
        self._parent: list[int] = []
        self._there: list[int] = []
        """By root, how many of its component are there."""
        for worker in workers:
            self.join(worker)

    def join(self, worker: int) -> None:
        """Take in a worker, connected to nobody."""
        self._node[worker] = len(self._parent)
        self._parent.append(len(self._parent))
        self._there.append(1)
        self.components += 1

    def leave(self, worker: int) -> None:
        """A worker is not there any more."""
        root = self.component(worker)
        del self._node[worker]
        self._there[root] -= 1
        self.components -= self._there[root] == 0

    def merge(self, members: Sequence[int]) -> None:
        """Connect workers that are there."""
        first = self.component(members[0])
        for member in members[1:]:
            other = self.component(member)
            if other != first:
                # The larger stays root, so that ways to it stay short.
                if self._there[other] > self._there[first]:
                    first, other = other, first
                self._parent[other] = first
                self._there[first] += self._there[other]
                self.components -= 1

    def component(self, worker: int) -> int:
        """What is equal for workers that are connected."""
        parent = self._parent
        node = self._node[worker]
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node
