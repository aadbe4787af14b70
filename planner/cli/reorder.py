"""``pipeplan plan PLAN``: the operations of a plan's own stages in a new order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.output import print_json, show, show_plan
from planner.errors import PipeplanError
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.runtime_rules import RuntimeRules
    from planner.search.orders.search import Schedule


def reorder(
    model: Path, output: Path, limits: dict[str, Any], rules: RuntimeRules | None, *, as_json: bool
) -> None:
    """Order the operations of a plan's stages again, perhaps for another runtime; show the plan."""
    from planner.prediction import load_plan
    from planner.search.orders.search import search_schedule
    from planner.verification import save_valid

    loaded = load_plan(model)
    if rules is not None:
        loaded = loaded.model_copy(update={"runtime": rules})
    found = search_schedule(loaded.problem, loaded.stages, split=loaded.job.splits, **limits)
    kept = _no_slower(loaded, found)
    made = _with_orders(loaded, found) if kept is None else kept
    save_valid(made, output)
    time_s, bound_s = made.predicted.iteration_time_s, found.lower_bound_s
    if as_json:
        data = {"plan": str(output), "method": "as before" if kept else found.method}
        print_json({**data, "iteration_time_s": time_s, "schedule_lower_bound_s": bound_s})
        return
    show_plan(made)
    found_s, old_s = found.iteration_time_s, loaded.predicted.iteration_time_s
    before = f"the old orders take {format_seconds(old_s)}"
    before = f"as run by {rules.name}" if rules else before
    gap = f", gap {max(0.0, time_s / bound_s - 1):.2%}" if bound_s > 0 else ""
    show(
        f"iteration time {format_seconds(found_s)} with {found.method}; {before}"
        if kept is None
        else f"the old orders stay: they take {format_seconds(time_s)}, and nothing faster was "
        f"found ({format_seconds(found_s)} with {found.method})",
        f"lower bound for every schedule of these stages {format_seconds(bound_s)}{gap}",
        f"wrote {output}",
    )


def _no_slower(plan: Plan, found: Schedule) -> Plan | None:
    """Return the plan with new predictions if its own orders are valid and no slower."""
    from planner.prediction import refresh
    from planner.verification import verify

    try:
        again = refresh(plan)
    except PipeplanError:
        return None
    is_slower = again.predicted.iteration_time_s > found.iteration_time_s
    # Orders that take more memory than there is may well be faster.
    return None if is_slower or verify(again) else again


def _with_orders(plan: Plan, found: Schedule) -> Plan:
    """Return the plan with the schedule's orders and new predictions.

    Its job allows the kinds of backward that the orders have.
    """
    from planner.plan.operations import format_order
    from planner.prediction import refresh
    from planner.space import widened

    kinds = {operation.kind for order in found.orders.values() for operation in order} - {"F"}
    job = plan.job.model_copy(update={"backward": widened(plan.job.backward, kinds)})
    orders = {device: format_order(list(order)) for device, order in found.orders.items()}
    return refresh(plan.model_copy(update={"orders": orders, "job": job}))
