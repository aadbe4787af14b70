"""The ledger of work units: which worker does each unit while pipelines join, leave and fail.

A work unit is what a pipeline does in one iteration: a fixed number of samples, always the same
ones for the same number. Every unit is committed exactly once or listed as dropped; units lost with
a worker are done again by another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from planner.errors import PipeplanError


@dataclass(frozen=True)
class WorkerUnits:
    """A worker's units: taken, committed, taken again after another lost them, and lost."""

    taken: int = 0
    committed: int = 0
    repeated: int = 0
    lost: int = 0


@dataclass(frozen=True)
class LedgerReport:
    """The state of a run's work units.

    Attributes:
        total: all units: ``committed`` + ``remaining`` + the number of ``dropped``.
        committed: number of units done.
        remaining: number of units still to be committed, taken or not.
        repeated: number of times a unit was taken again after it had been given back.
        dropped: units that nobody will do, ascending.
        workers: counts of each worker that has taken a unit.
    """

    total: int
    committed: int
    remaining: int
    repeated: int
    dropped: tuple[int, ...]
    workers: dict[int, WorkerUnits]


class WorkUnitLedger:
    """A ledger of work units ``0 .. total - 1``; its state depends only on the calls.

    Args:
        total: number of units.
    """

    def __init__(self, total: int) -> None:
        if total < 0:
            raise PipeplanError(f"total: {total} work units; expected 0 or more")
        self.total = total
        self._fresh = 0
        self._returned: deque[int] = deque()
        self._holder: dict[int, int] = {}
        """The worker of each unit that is taken and not committed."""
        self._by: dict[int, int] = {}
        """The worker that committed each unit."""
        self._dropped: set[int] = set()
        self._steps: dict[int, dict[int, int]] = {}
        """The unit of each worker and step; removed when the worker leaves."""
        self._counts: dict[int, dict[str, int]] = {}

    def take(self, worker: int, step: int) -> int | None:
        """Return the unit for a worker's step, the same one if the request is repeated.

        Units that were given back come first.

        Returns:
            None if no unit is left to take; one may come back later.
        """
        known = self._steps.get(worker, {}).get(step)
        if known is not None:
            return known
        unit = self._next()
        if unit is None:
            return None
        counts = self._counts.setdefault(
            worker, {"taken": 0, "committed": 0, "repeated": 0, "lost": 0}
        )
        counts["taken"] += 1
        if unit < self._fresh:
            counts["repeated"] += 1
            self._returned.popleft()
        self._fresh = max(self._fresh, unit + 1)
        self._holder[unit] = worker
        self._steps.setdefault(worker, {})[step] = unit
        return unit

    def commit(self, worker: int, unit: int) -> bool:
        """Note that a worker's unit is done.

        Returns:
            Whether the worker committed the unit, now or before. If not, the unit was given back or
            dropped meanwhile because the worker was considered dead.
        """
        if self._holder.get(unit) != worker:
            return self._by.get(unit) == worker
        del self._holder[unit]
        self._by[unit] = worker
        self._counts[worker]["committed"] += 1
        return True

    def give_back(self, worker: int) -> tuple[int, ...]:
        """Release a dead worker's units for others and return them.

        Its steps are forgotten, so that it may return and count from the start.
        """
        taken = self._steps.pop(worker, {}).values()
        units = tuple(unit for unit in taken if self._holder.get(unit) == worker)
        for unit in units:
            self._lose(unit)
            self._returned.append(unit)
        return units

    def drop(self, unit: int) -> bool:
        """Mark a unit as one that nobody will do; return False if it is already committed."""
        if not 0 <= unit < self.total:
            raise PipeplanError(f"unit: {unit} is not one of 0 to {self.total - 1}")
        if unit in self._by:
            return False
        self._dropped.add(unit)
        self._lose(unit)
        if unit in self._returned:
            self._returned.remove(unit)
        return True

    @property
    def committed(self) -> int:
        """Number of units done."""
        return len(self._by)

    @property
    def remaining(self) -> int:
        """Number of units still to be committed, taken or not."""
        return self.total - len(self._by) - len(self._dropped)

    def report(self) -> LedgerReport:
        """Return the state of all units."""
        return LedgerReport(
            total=self.total,
            committed=self.committed,
            remaining=self.remaining,
            repeated=sum(counts["repeated"] for counts in self._counts.values()),
            dropped=tuple(sorted(self._dropped)),
            workers={
                worker: WorkerUnits(**counts) for worker, counts in sorted(self._counts.items())
            },
        )

    def _lose(self, unit: int) -> None:
        holder = self._holder.pop(unit, None)
        if holder is not None:
            self._counts[holder]["lost"] += 1

    def _next(self) -> int | None:
        """Return the unit that would be taken now."""
        if self._returned:
            return self._returned[0]
        fresh = self._fresh
        while fresh in self._dropped:
            fresh += 1
        return fresh if fresh < self.total else None
