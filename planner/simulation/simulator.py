"""Timed replay of a pipeline's operations, transfers and reductions (docs/replay.md).

:mod:`planner.program.lower` makes a program of the stages and their orders,
:mod:`planner.program.kernel` replays it, and :mod:`planner.simulation.replayed` reads the events.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place_plan
from planner.errors import DeadlockError
from planner.plan.operations import Orders
from planner.plan.plan import Plan
from planner.simulation.timeline import Timeline


def simulate(
    pipeline: PlacedPipeline, orders: Orders, by_microbatch: Sequence[PlacedPipeline] = ()
) -> Timeline:
    """Replay given orders.

    Args:
        pipeline: stages with their times.
        orders: of all devices.
        by_microbatch: the same stages with the times and messages of each microbatch, where these
            differ; memory is that of ``pipeline``.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
        PipeplanError: if neighbouring stages are on devices that no path joins.
    """
    # numba takes half a second to import, so only who replays anything waits for that.
    from planner.program.lower.lower import lower_orders
    from planner.program.replay import replay
    from planner.simulation.replayed import timeline_of

    placed = {id(row): row for row in by_microbatch}
    numbers = {key: number for number, key in enumerate(placed)}
    length_of = [numbers[id(row)] for row in by_microbatch]
    lowered = lower_orders(pipeline, orders, tuple(placed.values()), length_of)
    return timeline_of(lowered, replay(lowered.program), by_microbatch)


def simulate_plan(plan: Plan) -> Timeline:
    """Replay a plan's orders under the cost model and the rules of its runtime.

    Args:
        plan: the plan; ``planner.verify`` checks whether it is valid.

    Returns:
        Start and end of each operation, transfer and all-reduce in seconds, with
        ``iteration_time_s``, ``bubble``, ``busy_s``, ``memory`` and ``peak_memory_bytes`` by
        device.

    Raises:
        DeadlockError: if the orders wait for each other; the message names every waiting device.
        PipeplanError: if an order has a word that is not an operation.
    """
    return simulate(place_plan(plan), plan.parsed_orders())


def reduced_soonest(timeline: Timeline) -> Timeline:
    """Return a timeline, with reductions after the last backwards if that is faster.

    Several buckets may lose more by their latencies than they gain by the overlap.
    """
    at_once = timeline.pipeline.reduced_at_once
    if at_once is None:
        return timeline
    try:
        later = simulate(at_once, timeline.orders)
    except DeadlockError:  # Of an estimate, whose replicas need not run the same.
        return timeline
    return min(timeline, later, key=lambda row: row.iteration_time_s)
