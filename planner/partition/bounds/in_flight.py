"""A lower bound on the iteration time from how many microbatches fit into memory at a time."""

from __future__ import annotations

from planner.costs.placement import PlacedPipeline
from planner.costs.ways import Ways
from planner.partition.bounds.schedule import balanced_load_s


def in_flight_bound_s(pipeline: PlacedPipeline, *, split: bool = False) -> float:
    """No schedule of these stages, with what they recompute, is faster.

    Of k microbatches in flight at a stage at most, sorted by their start, number m + k starts a
    round trip after number m at the earliest: when it starts, k - 1 others at most are unfinished,
    so at least m + 1 have ended, and the (m+1)-th to end has taken a round trip since a start not
    before number m's. The last ones take the longer of a round trip and their own work. Stages
    that share a device with others are left out, their limits would be loose.

    Args:
        pipeline: the stages.
        split: whether input and weight gradients may run apart.

    Returns:
        Seconds; infinity if some stage has no room for a microbatch.
    """
    ways, bound = Ways(pipeline, split), 0.0
    shares = any(len(stages) > 1 for stages in pipeline.stages_on.values())
    for index, stage in enumerate(pipeline.stages):
        if all(len(pipeline.stages_on[device]) == 1 for device in stage.spec.devices):
            home_s = 0.0 if shares else ways.home[index]
            bound = max(bound, ways.head[index] + _blocks_s(ways, index) + home_s)
    return bound


def _blocks_s(ways: Ways, index: int) -> float:
    """From a stage's first forward to its last backward."""
    count = ways.pipeline.microbatches
    limit, round_trip_s = ways.most_in_flight[index], ways.round_trip[index]
    if limit == 0:
        return float("inf")
    before = -(-count // limit) - 1
    last = max(round_trip_s, balanced_load_s(ways, index, count - before * limit))
    return before * round_trip_s + last
