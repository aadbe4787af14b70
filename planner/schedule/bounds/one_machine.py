"""Each device by itself: when its operations can start at the earliest and what must follow them.

The preemptive schedule of operations with heads and tails on one machine bounds every schedule of
all machines (Jackson 1955; Carlier 1982, "The one-machine sequencing problem").
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from planner.costs.placement import PlacedPipeline
from planner.costs.ways import Ways
from planner.schedule.bounds.chains import Chains, Times

MOST_OPERATIONS = 200_000
"""Of a pipeline; beyond this the bound takes too long."""
Timed = tuple[float, float, float]
"""Head, duration and tail of an operation, in seconds."""


def one_machine_bound_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """No schedule of these stages takes less time.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients run apart in all of them.

    Returns:
        Seconds; 0 with replicas, or where there are too many operations.
    """
    operations = (3 if split else 2) * len(pipeline.stages) * pipeline.microbatches
    if operations > MOST_OPERATIONS:
        return 0.0
    if any(len(stage.spec.devices) > 1 for stage in pipeline.stages):
        return 0.0
    return _OneMachine(Ways(pipeline, split)).bound_s()


@dataclass(frozen=True)
class _OneMachine:
    ways: Ways

    @property
    def _pipeline(self) -> PlacedPipeline:
        return self.ways.pipeline

    def bound_s(self) -> float:
        """The largest of all devices'."""
        if 0 in self.ways.most_in_flight:
            return float("inf")
        heads, tails = self._heads(), self._tails()
        return max(
            preemptive_makespan_s(self._timed(stages, heads, tails))
            for stages in self._pipeline.stages_on.values()
        )

    def _heads(self) -> tuple[Times, Times]:
        """Of forwards and gradients."""
        ways, nothing = self.ways, [0.0] * len(self.ways.forward)
        chains = (ways.forward, ways.gradient, ways.send, ways.send_back, nothing, nothing)
        return Chains(*chains, *self._rest).earliest()

    def _tails(self) -> tuple[Times, Times]:
        """Of gradients and forwards, the last microbatch first: the iteration from its end."""
        ways = self.ways
        chains = (ways.gradient, ways.forward, ways.send_back, ways.send, ways.weight, ways.tail)
        return Chains(*chains, *self._rest).earliest()

    @property
    def _rest(self) -> tuple[list[int], dict[int, tuple[int, ...]], int]:
        beside = {stage: stages for stages in self._pipeline.stages_on.values() for stage in stages}
        return self.ways.most_in_flight, beside, self._pipeline.microbatches

    def _timed(
        self, stages: Iterable[int], heads: tuple[Times, Times], tails: tuple[Times, Times]
    ) -> list[Timed]:
        """All operations of a device."""
        ways, count = self.ways, self._pipeline.microbatches
        rows: list[Timed] = []
        for stage in stages:
            for m in range(count):
                after = count - 1 - m
                gradient = heads[1][stage][m]
                rows.append((heads[0][stage][m], ways.forward[stage], tails[1][stage][after]))
                rows.append((gradient, ways.gradient[stage], tails[0][stage][after]))
                if ways.split:
                    ready = gradient + ways.gradient[stage]
                    rows.append((ready, ways.weight[stage], ways.tail[stage]))
        return rows


def preemptive_makespan_s(operations: Iterable[Timed]) -> float:
    """Least time until all operations and their tails are over, if one may interrupt another.

    Jackson's rule: of those released always the one with the longest tail.
    """
    waiting = sorted(operations, reverse=True)
    running: list[list[float]] = []
    now = makespan = 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, duration, tail = waiting.pop()
            heapq.heappush(running, [-tail, duration])
        until = waiting[-1][0] if waiting else float("inf")
        tail, left = running[0]
        if now + left <= until:
            heapq.heappop(running)
            now += left
            makespan = max(makespan, now - tail)
        else:
            running[0][1] = left - (until - now)
            now = until
    return makespan
