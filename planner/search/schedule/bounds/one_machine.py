"""Each device by itself: when its operations can start at the earliest and what must follow them.

The preemptive schedule of operations with heads and tails on one machine bounds every schedule of
all machines (Jackson 1955; Carlier 1982, "The one-machine sequencing problem").

Earliest starts: by what a device must run before an operation, and by what that waits for.

Microbatches are equal, so each kind of operation may be taken to run in their order. Then much of
what a device runs before an operation is known; it cannot start before the device could have done
that, each part of it as early as it could start itself.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline

Times = list[list[float]]
"""Times by stage and microbatch, in seconds."""


@dataclass(frozen=True)
class Chains:
    """A microbatch passes the stages one way and then back, the last one twice in a row.

    Forwards on the way there and gradients back; seen from the end of the iteration, gradients on
    the way there and forwards back.

    Attributes:
        there, back: seconds of the operations, by stage.
        send, send_back: seconds to the next stage and back from it, by stage.
        lead: before each operation on the way there the device runs one of so many seconds.
        lead_from: which no stage can start before.
        limit: the most microbatches between their start there and their end back, by stage.
        on_same_device: by stage, the stages on the same device, its own among them, in order.
        microbatches: their number.
    """

    there: Sequence[float]
    back: Sequence[float]
    send: Sequence[float]
    send_back: Sequence[float]
    lead: Sequence[float]
    lead_from: Sequence[float]
    limit: Sequence[int]
    on_same_device: Mapping[int, Sequence[int]]
    microbatches: int

    def earliest(self) -> tuple[Times, Times]:
        """Return the earliest starts of operations there and back; stages have no replicas."""
        count = len(self.there)
        there: Times = [[] for _ in range(count)]
        back: Times = [[] for _ in range(count)]
        before_there = [_Prefix() for _ in range(count)]
        before_back = [_Prefix() for _ in range(count)]
        for microbatch in range(self.microbatches):
            for stage in range(count):
                prefix = before_there[stage]
                self._add_before_there(prefix, stage, microbatch, there, back)
                arrival = self.lead_from[stage] + self.lead[stage]
                if stage:
                    sent = there[stage - 1][microbatch] + self.there[stage - 1]
                    arrival = max(arrival, sent + self.send[stage - 1])
                there[stage].append(max(arrival, prefix.end))
            for stage in reversed(range(count)):
                prefix = before_back[stage]
                self._add_before_back(prefix, stage, microbatch, there, back)
                arrival = there[stage][microbatch] + self.there[stage]
                if stage + 1 < count:
                    sent = back[stage + 1][microbatch] + self.back[stage + 1]
                    arrival = max(arrival, sent + self.send_back[stage])
                back[stage].append(max(arrival, prefix.end))
        return there, back

    def _add_before_there(
        self, prefix: _Prefix, stage: int, microbatch: int, there: Times, back: Times
    ) -> None:
        """Add what runs before this microbatch's forward but not before the last one's."""
        if self.lead[stage]:
            prefix.add_early(self.lead_from[stage], self.lead[stage])
        if microbatch:
            prefix.add(there[stage][microbatch - 1], self.there[stage])
        ended = microbatch - self.limit[stage]
        for other in self.on_same_device[stage]:
            if other < stage:
                prefix.add(there[other][microbatch], self.there[other])
            elif ended >= 0:
                prefix.add(back[other][ended], self.back[other])
                if other > stage:
                    prefix.add(there[other][ended], self.there[other])

    def _add_before_back(
        self, prefix: _Prefix, stage: int, microbatch: int, there: Times, back: Times
    ) -> None:
        for other in self.on_same_device[stage]:
            prefix.add(there[other][microbatch], self.there[other])
            if self.lead[other]:
                prefix.add_early(self.lead_from[other], self.lead[other])
            if other > stage:
                prefix.add(back[other][microbatch], self.back[other])
        if microbatch:
            prefix.add(back[stage][microbatch - 1], self.back[stage])


class _Prefix:
    """A growing set of operations on one device, and when it could have done them all."""

    def __init__(self) -> None:
        self._releases: list[float] = []
        self._durations: list[float] = []
        self._ends: list[float] = []
        self._total = 0.0
        self._early = 0.0
        self._early_from = math.inf

    @property
    def end(self) -> float:
        """When the last could end, each as soon as it is released; 0 of none."""
        ends = [self._ends[-1]] if self._ends else []
        if self._early:
            # Those released at once, and whatever is not released before them.
            first = min([self._early_from, *self._releases[:1]])
            ends.append(first + self._early + self._total)
        return max(ends, default=0.0)

    def add(self, release_s: float, duration_s: float) -> None:
        """Add an operation; releases mostly come in order, so little is counted again."""
        place = bisect_right(self._releases, release_s)
        self._releases.insert(place, release_s)
        self._durations.insert(place, duration_s)
        self._total += duration_s
        del self._ends[place:]
        end = self._ends[-1] if self._ends else 0.0
        for index in range(place, len(self._releases)):
            end = max(end, self._releases[index]) + self._durations[index]
            self._ends.append(end)

    def add_early(self, release_s: float, duration_s: float) -> None:
        """Add an operation released before most others; counted with all of them at once."""
        self._early_from = min(self._early_from, release_s)
        self._early += duration_s


MOST_OPERATIONS = 200_000
"""Operations of a pipeline beyond which the bound takes too long."""
Timed = tuple[float, float, float]
"""Head, duration and tail of an operation, in seconds."""


def one_machine_bound_s(pipeline: PlacedPipeline, *, split: bool) -> float:
    """Return a lower bound on the time of every schedule of these stages, in seconds.

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
    return _OneMachine(PathBounds(pipeline, split)).bound_s()


@dataclass(frozen=True)
class _OneMachine:
    ways: PathBounds

    @property
    def _pipeline(self) -> PlacedPipeline:
        return self.ways.pipeline

    def bound_s(self) -> float:
        """Return the largest bound of all devices."""
        if 0 in self.ways.most_in_flight:
            return float("inf")
        heads, tails = self._heads(), self._tails()
        return max(
            preemptive_makespan_s(self._timed(stages, heads, tails))
            for stages in self._pipeline.stages_on.values()
        )

    def _heads(self) -> tuple[Times, Times]:
        """Return the heads of forwards and gradients."""
        ways, nothing = self.ways, [0.0] * len(self.ways.forward)
        chains = (ways.forward, ways.gradient, ways.send, ways.send_back, nothing, nothing)
        return Chains(*chains, *self._rest).earliest()

    def _tails(self) -> tuple[Times, Times]:
        """Return the tails of gradients and forwards, the last microbatch first."""
        ways = self.ways
        chains = (ways.gradient, ways.forward, ways.send_back, ways.send, ways.weight, ways.tail)
        return Chains(*chains, *self._rest).earliest()

    @property
    def _rest(self) -> tuple[list[int], dict[int, tuple[int, ...]], int]:
        on_same_device = {
            stage: stages for stages in self._pipeline.stages_on.values() for stage in stages
        }
        return self.ways.most_in_flight, on_same_device, self._pipeline.microbatches

    def _timed(
        self, stages: Iterable[int], heads: tuple[Times, Times], tails: tuple[Times, Times]
    ) -> list[Timed]:
        """Return all operations of a device with heads and tails."""
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
    """Return the least time until all operations and their tails end, with preemption.

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
