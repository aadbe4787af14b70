"""Microbatches in flight that let a pipeline run fastest once it is full."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from planner.costs.placed_pipeline import PlacedPipeline

Extra = Callable[[int, int], Mapping[str, float] | None]
"""Extra backward seconds by device of (stage, microbatches in flight a replica); None: no room."""
STEPS = 12
"""Rounds of the bisection for the period: to a few thousandths of its range."""


def best_in_flight(pipeline: PlacedPipeline, extra: Extra) -> dict[int, int] | None:
    """Return the microbatches in flight on each replica, by stage, for the shortest period.

    In the steady state a stage of r replicas with k microbatches in flight each starts one every
    T seconds at best, where its replicas need no more than T together, and r * k * T covers the
    way of a microbatch from its forward through all later stages to the end of its backward
    (Little's law). More in flight cover a longer way, and recomputing for them lengthens it.

    Args:
        pipeline: the stages, nothing recomputed.
        extra: what microbatches in flight cost.

    Returns:
        None if some stage has no room for one.
    """
    if any(extra(j, 1) is None for j in range(len(pipeline.stages))):
        return None
    periods = _Periods(pipeline, extra)
    low = periods.least_s
    found = periods.in_flight(low)
    if found is not None:
        return found
    high = 2 * low
    while (found := periods.in_flight(high)) is None:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        better = periods.in_flight(middle)
        low, high = (middle, high) if better is None else (low, middle)
        found = better or found
    return found


class _Periods:
    """The period of each stage and the way through the later ones."""

    def __init__(self, pipeline: PlacedPipeline, extra: Extra) -> None:
        self._pipeline = pipeline
        self._extra = extra
        self._seconds = [
            {device: times.forward_s + times.backward_s for device, times in stage.times.items()}
            for stage in pipeline.stages
        ]
        self._most = [-(-pipeline.microbatches // len(each)) for each in self._seconds]
        self.least_s = max(1e-12, *(_together_s(each) for each in self._seconds)) * (1 + 1e-9)

    def in_flight(self, period_s: float) -> dict[int, int] | None:
        """Return the fewest in flight with which every stage keeps the period; None if none do.

        From the last stage to the first: fewer recompute less, so the way of the stages before is
        the shortest too.
        """
        held: dict[int, int] = {}
        way_s = 0.0
        for j in reversed(range(len(self._seconds))):
            way_s += self._transfers_s(j)
            found = self._least(j, way_s, period_s)
            if found is None:
                return None
            held[j], way_s = found
        return held

    def _least(self, j: int, way_s: float, period_s: float) -> tuple[int, float] | None:
        """Return microbatches in flight on each replica of a stage, and the way with its own times.

        All microbatches in flight are enough for any way.
        """
        replicas, most = len(self._seconds[j]), self._most[j]
        held = 1
        while True:
            extra = self._extra(j, held)
            if extra is None:
                return None
            each = {device: s + extra[device] for device, s in self._seconds[j].items()}
            if _together_s(each) > period_s:
                return None
            total_s = way_s + max(each.values())
            needed = min(most, math.ceil(total_s / (replicas * period_s) - 1e-9))
            if needed <= held:
                return held, total_s
            held = needed

    def _transfers_s(self, j: int) -> float:
        """Return the seconds to the next stage and back, between the first replicas."""
        if j + 1 == len(self._seconds):
            return 0.0
        u, v = (self._pipeline.stages[i].spec.devices[0] for i in (j, j + 1))
        there = self._pipeline.forward_transfer(j, u, v).seconds
        return there + self._pipeline.backward_transfer(j + 1, v, u).seconds


def _together_s(each: Mapping[str, float]) -> float:
    """Return seconds a microbatch of replicas that share the work by their speeds."""
    if min(each.values()) <= 0:
        return 0.0
    return 1 / sum(1 / seconds for seconds in each.values())
