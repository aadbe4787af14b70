"""What a search has found so far: the best plan, plans near it, the bound, and the history."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from planner.bounds import ProvedBound
from planner.search.clock import Clock
from planner.search.result import HistoryRow
from planner.simulation.timeline import Timeline

NEAR = 0.05
"""Share by which a plan may be slower than the best one and still be chosen at the end."""
MOST_NEAR = 24
Progress = Callable[[HistoryRow], None]


@dataclass(frozen=True)
class Found:
    """A schedule of stages, replayed only when it is looked at.

    Attributes:
        seconds: its iteration time.
        method: the step that found it.
        make: returns its replay.
    """

    seconds: float
    method: str
    make: Callable[[], Timeline]

    @classmethod
    def of(cls, timeline: Timeline, method: str) -> Found:
        """Return what a replay shows."""
        return cls(timeline.iteration_time_s, method, lambda: timeline)

    @cached_property
    def timeline(self) -> Timeline:
        """The replay; the stages are those of its pipeline."""
        return self.make()


class Incumbent:
    """The findings of one search.

    Args:
        clock: of the search.
        progress: called with every new incumbent or bound.
        gap_limit: a gap that is small enough to end the search.

    Attributes:
        best: the fastest plan; None before the first.
        near: plans that are nearly as fast, the fastest first.
        proved: the bound with its argument; None before the first.
        decided_s: no plan takes less by the word of CP-SAT, which nobody can check; 0: unknown.
        tried: number of layouts that were judged.
    """

    def __init__(self, clock: Clock, progress: Progress, gap_limit: float = 0.0) -> None:
        self._clock, self._progress, self._gap_limit = clock, progress, gap_limit
        self.best: Found | None = None
        self.near: list[Found] = []
        self.proved: ProvedBound | None = None
        self.decided_s = 0.0
        self.tried = 0

    @property
    def best_s(self) -> float:
        """The time of the best plan; infinite before the first."""
        return math.inf if self.best is None else self.best.seconds

    @property
    def bound_s(self) -> float:
        """No plan takes less."""
        proved_s = 0.0 if self.proved is None else self.proved.bound_s
        return min(self.best_s, max(proved_s, self.decided_s))

    @property
    def is_enough(self) -> bool:
        """Whether the gap is as small as was asked for."""
        return self.best_s <= self.bound_s * (1 + self._gap_limit)

    def offer(self, found: Found) -> bool:
        """Take a plan; return whether it is the best."""
        is_best = found.seconds < self.best_s
        if is_best:
            self.best = found
            self._record(found.method)
        rows = sorted((*self.near, found), key=lambda row: row.seconds)
        self.near = [row for row in rows if row.seconds <= self.best_s * (1 + NEAR)][:MOST_NEAR]
        return is_best

    def drop(self, found: Found) -> None:
        """Take back a plan that turned out to be none."""
        self.near = [row for row in self.near if row is not found]
        self.best = self.near[0] if self.near else None

    def prove(self, proved: ProvedBound) -> None:
        """Take a bound, if it is higher than before."""
        before_s = self.bound_s
        if self.proved is None or proved.bound_s > self.proved.bound_s:
            self.proved = proved
        if self.bound_s > before_s:
            self._record("bound: certificate")

    def decide(self, bound_s: float) -> None:
        """Take a bound without a certificate, if it is higher than before."""
        before_s = self.bound_s
        self.decided_s = max(self.decided_s, bound_s)
        if self.bound_s > before_s:
            self._record("bound: CP-SAT's decisions")

    def _record(self, event: str) -> None:
        self._progress(HistoryRow(self._clock.elapsed_s, self.best_s, self.bound_s, event))
