"""What it costs that a tool runs microbatches in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan
from planner.export.recomputation import against
from planner.simulator import Timeline
from planner.units import format_seconds
from planner.verifier import replay


def order_notes(tool: str, name: str, plan: Plan, theirs: Timeline) -> Iterator[str]:
    """A line on how a tool's order compares; none where another order shows the same time.

    Args:
        tool: that has one order only.
        name: of that order.
        plan: verified.
        theirs: its stages simulated in that order.
    """
    ours = replay(plan)
    before_s, after_s = ours.iteration_time_s, theirs.iteration_time_s
    if _orders_of(ours) == _orders_of(theirs) and abs(after_s - before_s) <= 1e-9 * before_s:
        yield f"{tool} runs the plan's own order, {name}"
    elif format_seconds(after_s) != format_seconds(before_s):
        yield f"{tool} runs {name} in place of this order: {against(after_s, before_s)}"


def _orders_of(timeline: Timeline) -> dict[str, list[Operation]]:
    """What ran on each device, in order."""
    orders: dict[str, list[Operation]] = {}
    for event in timeline.operations:
        orders.setdefault(event.device, []).append(event.operation)
    return orders
