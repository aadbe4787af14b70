"""Memory of a device divided among its stages: a restriction under which good schedules are found.

Where a device holds several stages, what one of them may keep depends on what the others keep. With
a fixed share of the memory for each stage, a forward waits for gradients of its own stage alone,
and schedules are found far more quickly. Which shares are good is found by local search: memory
goes from one stage to another, and list schedules say whether that helps. Our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.costs.placed_pipeline import PlacedPipeline
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.heuristic import Schedule, fits_memory
from planner.search.schedule.list_scheduler import (
    backward_first,
    forward_first,
    lifetime_limits,
    list_schedule,
)
from planner.search.schedule.measure import Measure, measured_s

Shares = Mapping[tuple[int, str], int]
"""Bytes for stashes by (stage, device)."""
STEPS = (1, 1, 2)
"""Stashes that go from one stage to another at a time, drawn from these."""
PATIENCE = 400
"""Moves in a row that lead to nothing better after which the search ends."""


@dataclass(frozen=True)
class SharedSchedule:
    """A schedule in which every stage keeps to its share."""

    shares: Shares
    schedule: Schedule


def divides_memory(pipeline: PlacedPipeline) -> bool:
    """Return whether some device holds several stages, and no stage has replicas."""
    several = any(len(stages) > 1 for stages in pipeline.stages_on.values())
    return several and all(len(stage.spec.devices) == 1 for stage in pipeline.stages)


def search_shares(
    pipeline: PlacedPipeline,
    *,
    split: bool,
    measure: Measure,
    seed: int,
    may_go_on: Callable[[int], bool],
) -> SharedSchedule | None:
    """Search for shares with a fast list schedule.

    Args:
        pipeline: stages without replicas.
        split: whether input and weight gradients run apart.
        measure: what is to be small.
        seed: of the moves.
        may_go_on: called with the number of operations before each list schedule.

    Returns:
        The best that was found; None if no list schedule fits any shares that were tried.
    """
    search = _Search(pipeline, split, measure, random.Random(seed), may_go_on)
    return search.run()


class _Search:
    """A descent over the shares, by random moves that do not make it worse."""

    def __init__(
        self,
        pipeline: PlacedPipeline,
        split: bool,
        measure: Measure,
        random_: random.Random,
        may_go_on: Callable[[int], bool],
    ) -> None:
        self._pipeline = pipeline
        self._split = split
        self._measure: Measure = measure
        self._random = random_
        self._may_go_on = may_go_on
        self._owner = balanced_assignment(pipeline)
        self._room = {device: self._room_bytes(device) for device in pipeline.devices}
        self._several = [d for d, stages in pipeline.stages_on.items() if len(stages) > 1]
        self._operations = len(pipeline.stages) * pipeline.microbatches * (3 if split else 2)

    def run(self) -> SharedSchedule | None:
        """Start from shares in proportion to lifetimes."""
        counts = self._first()
        if counts is None:
            return None
        best, idle = self._listed(counts), 0
        while idle < PATIENCE and self._may_go_on(2 * self._operations):
            idle += 1
            moved = self._moved(counts)
            found = self._listed(moved) if moved is not None else None
            if moved is None or found is None or self._is_worse(found, best):
                continue
            if best is None or self._value_s(found) < self._value_s(best):
                idle = 0
            counts, best = moved, found
        return best

    def _is_worse(self, found: SharedSchedule, best: SharedSchedule | None) -> bool:
        return best is not None and self._value_s(found) > self._value_s(best)

    def _value_s(self, found: SharedSchedule) -> float:
        return measured_s(found.schedule.timeline, self._measure)

    def _room_bytes(self, device: str) -> int:
        """Return the bytes left for stashes with room for the largest output."""
        pipeline = self._pipeline
        output = max(pipeline.stages[stage].output_bytes for stage in pipeline.stages_on[device])
        return pipeline.capacity_bytes(device) - pipeline.static_bytes(device) - output

    def _first(self) -> dict[int, int] | None:
        """Return stashes by stage; None if a device has no room for one of each of its stages."""
        limits = next(lifetime_limits(self._pipeline, split=self._split, factors=(1.0,)))
        counts = {stage: count for (stage, _), count in limits.items()}
        for device, stages in self._pipeline.stages_on.items():
            while self._left_bytes(device, counts) < 0:
                largest = max(stages, key=lambda stage: counts[stage])
                if counts[largest] == 1:
                    return None
                counts[largest] -= 1
            self._fill(device, counts)
        return counts

    def _left_bytes(self, device: str, counts: Mapping[int, int]) -> int:
        stages = self._pipeline.stages_on[device]
        held = sum(counts[stage] * self._pipeline.stages[stage].stash_bytes for stage in stages)
        return self._room[device] - held

    def _fill(self, device: str, counts: dict[int, int]) -> None:
        """Hand out what is left."""
        for stage in self._drawn(self._pipeline.stages_on[device]):
            stash = self._pipeline.stages[stage].stash_bytes
            more = self._left_bytes(device, counts) // stash if stash else 0
            counts[stage] += min(more, self._pipeline.microbatches - counts[stage])

    def _drawn(self, stages: tuple[int, ...]) -> Iterator[int]:
        yield from self._random.sample(stages, len(stages))

    def _moved(self, counts: Mapping[int, int]) -> dict[int, int] | None:
        """Move memory from one stage to another of a device; None if it has none to give."""
        device = self._random.choice(self._several)
        giver, taker, *_ = self._drawn(self._pipeline.stages_on[device])
        step = self._random.choice(STEPS)
        if counts[giver] <= step:
            return None
        moved = dict(counts)
        moved[giver] -= step
        stash = self._pipeline.stages[taker].stash_bytes
        more = self._left_bytes(device, moved) // stash if stash else 0
        moved[taker] = min(moved[taker] + more, self._pipeline.microbatches)
        return moved

    def _listed(self, counts: Mapping[int, int]) -> SharedSchedule | None:
        """Return the better of two list schedules that keep to the shares."""
        pipeline = self._pipeline
        device_of = {stage: row.spec.devices[0] for stage, row in enumerate(pipeline.stages)}
        limits = {(stage, device_of[stage]): count for stage, count in counts.items()}
        shares = {
            (stage, device): count * pipeline.stages[stage].stash_bytes
            for (stage, device), count in limits.items()
        }
        best: SharedSchedule | None = None
        for priority in (backward_first, forward_first):
            timeline = list_schedule(
                pipeline, self._owner, limits, priority, split=self._split, shares=shares
            )
            if timeline is None or not fits_memory(timeline):
                continue
            found = SharedSchedule(
                shares, Schedule(timeline.orders, timeline, f"shares, {priority.__name__}")
            )
            if best is None or self._value_s(found) < self._value_s(best):
                best = found
        return best
