"""Workers by how far they are, so that those who lag are left out without looking at them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from random import Random


class Levels:
    """A set of workers, each at the iteration it has reached.

    Putting in and taking out costs no more for many workers than for few.
    """

    def __init__(self) -> None:
        self._workers: dict[int, list[int]] = {}
        self._ascending: list[int] = []
        self._place: dict[int, tuple[int, int]] = {}

    def put(self, worker: int, level: int) -> None:
        """Put in a worker, or move it to another level."""
        self.discard(worker)
        workers = self._workers.get(level)
        if workers is None:
            workers = self._workers[level] = []
            insort(self._ascending, level)
        self._place[worker] = level, len(workers)
        workers.append(worker)

    def discard(self, worker: int) -> None:
        """Take out a worker if it is in."""
        place = self._place.pop(worker, None)
        if place is None:
            return
        level, index = place
        workers = self._workers[level]
        last = workers.pop()
        if last != worker:
            workers[index] = last
            self._place[last] = place
        if not workers:
            del self._workers[level]
            del self._ascending[bisect_left(self._ascending, level)]

    def from_above(self, lowest: int) -> Iterator[tuple[int, list[int]]]:
        """The levels from the highest to ``lowest``, each with its workers."""
        for level in reversed(self._ascending):
            if level < lowest:
                return
            yield level, self._workers[level]

    def sample(self, most: int, lowest: int, random: Random) -> list[int]:
        """Different workers at ``lowest`` or above, drawn evenly; all, if there are no more."""
        levels = [workers for _, workers in self.from_above(lowest)]
        total = sum(map(len, levels))
        drawn = random.sample(range(total), min(most, total))
        return [_at(levels, index) for index in drawn]


def _at(levels: list[list[int]], index: int) -> int:
    """The worker of that number over all levels."""
    for workers in levels:
        if index < len(workers):
            return workers[index]
        index -= len(workers)
    raise IndexError(index)
