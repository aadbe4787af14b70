"""The measures of a schedule: its iteration time, or the longest span of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Literal

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation
from planner.search.partition.bounds.partition import in_flight_bound_s
from planner.search.partition.bounds.schedule import link_load_bound_s, schedule_bound_s
from planner.search.schedule.bounds.one_machine import one_machine_bound_s
from planner.search.schedule.bounds.windows import iteration_bound_s, longest_span_bound_s
from planner.simulation.timeline import OperationEvent, Timeline, TransferEvent

Event = OperationEvent | TransferEvent


def compacted(timeline: Timeline) -> Timeline:
    """Return the same orders on every device and link in turn, everything as late as possible.

    The last operation of each device ends when it did, and so does the iteration. Where iterations
    overlap, a device runs the end of the one before in the time that this frees.
    """
    events: list[Event] = [*timeline.operations, *timeline.transfers]
    later: dict[int, set[int]] = {number: set() for number in range(len(events))}
    for first, second in _in_turn(timeline, events):
        later[first].add(second)
    last_of = {event.device: number for number, event in enumerate(timeline.operations)}
    fixed = set(last_of.values())
    start: dict[int, float] = {}
    for number in TopologicalSorter(later).static_order():
        event = events[number]
        end_s = min((start[other] for other in later[number]), default=event.end_s)
        if number in fixed:
            end_s = min(end_s, event.end_s)
        start[number] = end_s - (event.end_s - event.start_s)
    moved = [
        replace(event, start_s=start[number], end_s=start[number] + event.end_s - event.start_s)
        for number, event in enumerate(events)
    ]
    operations = [event for event in moved if isinstance(event, OperationEvent)]
    transfers = [event for event in moved if isinstance(event, TransferEvent)]
    return replace(
        timeline,
        operations=tuple(sorted(operations, key=lambda event: event.start_s)),
        transfers=tuple(sorted(transfers, key=lambda event: event.start_s)),
    )


def _in_turn(timeline: Timeline, events: list[Event]) -> Iterator[tuple[int, int]]:
    """Yield pairs of events, by number, of which the second starts after the first's end."""
    on: defaultdict[object, list[int]] = defaultdict(list)
    number_of: dict[Operation, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, OperationEvent):
            on[event.device].append(number)
            number_of[event.operation] = number
        else:
            # What takes no time holds no link, and has no place in the order of those that do.
            for resource in event.occupied if event.end_s > event.start_s else ():
                on[resource].append(number)
    for row in on.values():
        yield from pairwise(row)
    for number, event in enumerate(events):
        if isinstance(event, TransferEvent):
            stage, kind, microbatch = event.operation
            yield _either(number_of, stage, kind, microbatch), number
            step = 1 if kind == "F" else -1
            yield number, _either(number_of, stage + step, kind, microbatch)


def _either(number_of: dict[Operation, int], stage: int, kind: str, microbatch: int) -> int:
    """Return the number of a forward, or of a whole backward or input gradient."""
    if kind == "F":
        return number_of[Operation(stage, "F", microbatch)]
    whole = number_of.get(Operation(stage, "B", microbatch))
    return whole if whole is not None else number_of[Operation(stage, "I", microbatch)]


Measure = Literal["makespan", "longest_stage_span"]
"""Time of an iteration; or the largest time from a stage's first operation to its last, the
zero-bubble paper's objective (Qi et al. 2023), for iterations that overlap."""


def timed(timeline: Timeline, measure: Measure) -> Timeline:
    """Return the orders of a replay at the times by which the measure takes them."""
    return timeline if measure == "makespan" else compacted(timeline)


def measured_s(timeline: Timeline, measure: Measure) -> float:
    """Return a schedule's time by a measure, in seconds."""
    if measure == "makespan":
        return timeline.iteration_time_s
    timeline = compacted(timeline)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for event in timeline.operations:
        stage = event.operation.stage
        first[stage] = min(first.get(stage, event.start_s), event.start_s)
        last[stage] = max(last.get(stage, event.end_s), event.end_s)
    return max(last[stage] - first[stage] for stage in first)


def measure_bound_s(pipeline: PlacedPipeline, measure: Measure, *, split: bool) -> float:
    """Return a lower bound on a measure over all schedules of the stages.

    Args:
        pipeline: the stages.
        measure: seconds of what.
        split: whether input and weight gradients run apart in all schedules.
    """
    if measure == "longest_stage_span":
        return longest_span_bound_s(pipeline, split=split)
    return max(
        iteration_bound_s(pipeline, split=split),
        one_machine_bound_s(pipeline, split=split),
        link_load_bound_s(pipeline),
        # These cover replicas too.
        schedule_bound_s(pipeline, split=split),
        in_flight_bound_s(pipeline, split=split),
    )
