"""Our schedule of an instance, its bound, and the best published schedule beside it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from benchmarks.harness import Row, tell
from benchmarks.schedule.instances import Instance
from planner.costs.placed_pipeline import PlacedPipeline
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders
from planner.schedules.split import split_backwards
from planner.search.clock import Clock
from planner.search.orders.search import ScheduleSearch
from planner.simulation.simulator import simulate


@dataclass(frozen=True)
class Solved:
    """A solved instance; times in microseconds.

    Attributes:
        name: of the instance.
        best_us, bound_us: of our schedule.
        classic_us: of the best published one within memory; infinity if none fits.
        seconds: that the search took.
    """

    name: str
    best_us: float
    bound_us: float
    classic_us: float
    seconds: float

    @property
    def gap(self) -> float:
        """Time / bound - 1."""
        return max(0.0, self.best_us / self.bound_us - 1)

    @property
    def row(self) -> Row:
        """The row of the table."""
        fits = math.isfinite(self.classic_us)
        return {
            "instance": self.name,
            "ours": self.best_us,
            "bound": self.bound_us,
            "gap %": 100 * self.gap,
            "best published / ours": self.classic_us / self.best_us if fits else None,
            "s": self.seconds,
        }


def solve(instance: Instance, whole: bool, limit_s: float) -> Solved:
    """Schedule an instance by our search and by every published schedule.

    Args:
        instance: stages and microbatches.
        whole: whether backwards are whole; otherwise input and weight gradients run apart.
        limit_s: of the search.
    """
    pipeline, begin_s = instance.pipeline(), time.perf_counter()
    search = ScheduleSearch(pipeline, Clock(limit_s, deterministic=False), splits=not whole)
    search.run()
    solved = Solved(
        instance.name,
        _microseconds(search.best_s),
        _microseconds(min(search.bound_s, search.best_s)),
        _microseconds(_published_s(pipeline, split=not whole)),
        round(time.perf_counter() - begin_s, 1),
    )
    tell(str(solved.row))
    return solved


def _published_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """Return the time of the best published schedule within memory.

    Where gradients run apart, its whole backwards count as input and weight gradients in a row.
    """
    best_s = math.inf
    for _, orders in published_orders(pipeline, balanced_assignment(pipeline), split=split):
        apart = {d: split_backwards(o) for d, o in orders.items()} if split else orders
        timeline = simulate(pipeline, apart)
        if not timeline.overflow_bytes:
            best_s = min(best_s, timeline.iteration_time_s)
    return best_s


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
