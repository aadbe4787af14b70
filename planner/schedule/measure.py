"""What of a schedule is to be small."""

from __future__ import annotations

from typing import Literal

from planner.costs.placement import PlacedPipeline
from planner.partition.bounds.in_flight import in_flight_bound_s
from planner.partition.bounds.link_loads import link_load_bound_s
from planner.partition.bounds.schedule import schedule_bound_s
from planner.schedule.bounds.one_machine import one_machine_bound_s
from planner.schedule.bounds.windows import iteration_bound_s, longest_span_bound_s
from planner.schedule.compaction import compacted
from planner.simulator import Timeline

Measure = Literal["makespan", "longest_stage_span"]
"""Time of an iteration; or the largest time from a stage's first operation to its last, the
zero-bubble paper's objective (Qi et al. 2023), for iterations that overlap."""


def timed(timeline: Timeline, measure: Measure) -> Timeline:
    """The orders of a replay at the times by which the measure takes them."""
    return timeline if measure == "makespan" else compacted(timeline)


def measured_s(timeline: Timeline, measure: Measure) -> float:
    """A schedule's time by a measure, in seconds."""
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
    """No schedule of the stages has less of a measure.

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
