"""A lower bound on the iteration time from how many microbatches fit into memory at a time."""

from __future__ import annotations

from planner.artifacts.operations import Kind
from planner.costs.placement import PlacedPipeline
from planner.partition.bounds.schedule import balanced_load_s, ways_home_s


def in_flight_bound_s(pipeline: PlacedPipeline) -> float:
    """No schedule of these stages, with what they recompute and whole backwards, is faster.

    Of k microbatches in flight at a stage at most, sorted by their start, number m + k starts a
    round trip after number m at the earliest: when it starts, k - 1 others at most are unfinished,
    so at least m + 1 have ended, and the (m+1)-th to end has taken a round trip since a start not
    before number m's. The last ones take the longer of a round trip and their own work. Stages
    that share a device with others are left out, their limits would be loose.

    Returns:
        Seconds; infinity if some stage has no room for a microbatch.
    """
    bound = 0.0
    head = 0.0
    round_trips = round_trips_s(pipeline)
    shares = any(len(stages) > 1 for stages in pipeline.stages_on.values())
    home = [0.0] * len(round_trips) if shares else ways_home_s(pipeline)
    for index, stage in enumerate(pipeline.stages):
        if all(len(pipeline.stages_on[device]) == 1 for device in stage.spec.devices):
            bound = max(bound, head + _blocks_s(pipeline, index, round_trips[index]) + home[index])
        head += stage.least_s("F") + _transfer_s(pipeline, index, forward=True)
    return bound


def _blocks_s(pipeline: PlacedPipeline, index: int, round_trip_s: float) -> float:
    """From a stage's first forward to its last backward."""
    stage, count = pipeline.stages[index], pipeline.microbatches
    if not stage.least_s("F"):
        # What is held for no time, as the output of a forward of no length, counts in no replay.
        return max(round_trip_s, balanced_load_s(stage, count))
    limit = sum(
        pipeline.stash_limit(index, device, whole_backwards=True) for device in stage.spec.devices
    )
    if limit == 0:
        return float("inf")
    before = -(-count // limit) - 1
    last = max(round_trip_s, balanced_load_s(stage, count - before * limit))
    return before * round_trip_s + last


def round_trips_s(pipeline: PlacedPipeline, gradient: Kind = "B") -> list[float]:
    """From each stage's forward through all later stages to the end of its backward, at least.

    Args:
        pipeline: the stages.
        gradient: the backward that sends gradients on, ``I`` for schedules that split backwards.
    """
    trips: list[float] = []
    way = 0.0
    for index in reversed(range(len(pipeline.stages))):
        stage = pipeline.stages[index]
        way += stage.least_s("F") + stage.least_s(gradient)
        way += _transfer_s(pipeline, index, forward=True)
        way += _transfer_s(pipeline, index, forward=False)
        trips.append(way)
    return trips[::-1]


def _transfer_s(pipeline: PlacedPipeline, index: int, *, forward: bool) -> float:
    """To the next stage or back from it, over the best pair of devices; 0 after the last."""
    if index + 1 == len(pipeline.stages):
        return 0.0
    return float(pipeline.transfers_s(index, forward=forward).min())
