"""The ledger of work units: which worker does each unit while pipelines join, leave and fail.

A work unit is what a pipeline does in one iteration: a fixed number of samples, always the same
ones for the same number. Every unit is committed exactly once; units lost with a worker are done
again by another.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

from planner.errors import PipeplanError

_COUNTS = ("taken", "committed", "repeated", "lost")


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
        """Units from this one on have never been taken."""
        self._returned: deque[int] = deque()
        self._holder: dict[int, int] = {}
        """The worker of each unit that is taken and not committed."""
        self._by: dict[int, int] = {}
        """The worker that committed each unit."""
        self._steps: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The unit of each worker and step; removed when the worker leaves."""
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def take(self, worker: int, step: int) -> int | None:
        """Return the unit for a worker's step, the same one if the request is repeated.

        Units that were given back come first.

        Returns:
            None if no unit is left to take; one may come back later.
        """
        known = self._steps[worker].get(step)
        if known is not None:
            return known
        if self._returned:
            unit = self._returned.popleft()
            self._counts[worker]["repeated"] += 1
        elif self._fresh < self.total:
            unit = self._fresh
            self._fresh += 1
        else:
            return None
        self._counts[worker]["taken"] += 1
        self._holder[unit] = worker
        self._steps[worker][step] = unit
        return unit

    def commit(self, worker: int, unit: int) -> bool:
        """Note that a worker's unit is done.

        Returns:
            Whether the worker committed the unit, now or before. If not, the unit was given back
            meanwhile because the worker was considered dead.
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
            del self._holder[unit]
            self._counts[worker]["lost"] += 1
        self._returned.extend(units)
        return units

    @property
    def committed(self) -> int:
        """Number of units done."""
        return len(self._by)

    @property
    def remaining(self) -> int:
        """Number of units still to be committed, taken or not."""
        return self.total - len(self._by)

    def report(self) -> dict[str, Any]:
        """Return the state of all units, for JSON.

        ``total`` units are ``committed`` or ``remaining``; ``repeated`` counts how often one was
        taken again after it had been given back; ``workers`` has the counts of each worker that has
        taken a unit: units taken, committed, taken again after another lost them, and lost.
        """
        counts = {
            worker: {name: counts[name] for name in _COUNTS}
            for worker, counts in sorted(self._counts.items())
        }
        return {
            "total": self.total,
            "committed": self.committed,
            "remaining": self.remaining,
            "repeated": sum(row["repeated"] for row in counts.values()),
            "workers": counts,
        }
