"""Workers by progress, so that those far behind are left out without looking at each of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from random import Random


class Levels:
    """A set of workers, each at the iteration it has reached.

    Adding and removing take constant time.
    """

    def __init__(self) -> None:
        self._workers: dict[int, list[int]] = {}
        self._ascending: list[int] = []
        self._position: dict[int, tuple[int, int]] = {}

    def put(self, worker: int, level: int) -> None:
        """Add a worker, or move it to another level."""
        self.discard(worker)
        workers = self._workers.get(level)
        if workers is None:
            workers = self._workers[level] = []
            insort(self._ascending, level)
        self._position[worker] = level, len(workers)
        workers.append(worker)

    def discard(self, worker: int) -> None:
        """Remove a worker if it is in the set."""
        position = self._position.pop(worker, None)
        if position is None:
            return
        level, index = position
        workers = self._workers[level]
        last = workers.pop()
        if last != worker:
            workers[index] = last
            self._position[last] = position
        if not workers:
            del self._workers[level]
            del self._ascending[bisect_left(self._ascending, level)]

    @property
    def lowest(self) -> int:
        """The lowest level that somebody is at; there must be somebody."""
        return self._ascending[0]

    def from_above(self, lowest: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the levels from the highest to ``lowest``, each with its workers."""
        for level in reversed(self._ascending):
            if level < lowest:
                return
            yield level, self._workers[level]

    def sample(self, most: int, lowest: int, random: Random) -> list[int]:
        """Return different workers at ``lowest`` or above, uniformly drawn; at most all of them."""
        levels = [workers for _, workers in self.from_above(lowest)]
        total = sum(map(len, levels))
        drawn = random.sample(range(total), min(most, total))
        return [_at(levels, index) for index in drawn]


def _at(levels: list[list[int]], index: int) -> int:
    """Return the worker of an index over all levels."""
    for workers in levels:
        if index < len(workers):
            return workers[index]
        index -= len(workers)
    raise IndexError(index)


Nodes = tuple[tuple[int, ...], ...]
"""The workers of each node."""
USUAL = 4
"""Workers per node in Ripples' own experiments."""


def nodes_of(workers: int, pipelines_per_node: int | None) -> Nodes:
    """Return nodes of consecutive workers; the last may have fewer.

    If the number per node is unknown, or there is only one node or one worker per node, nodes of 4
    workers are assumed, or of 2 with fewer than 8 workers.
    """
    size = pipelines_per_node or 1
    if size == 1 or size >= workers:
        size = USUAL if workers >= 2 * USUAL else 2
    return tuple(
        tuple(range(first, min(first + size, workers))) for first in range(0, workers, size)
    )
