"""``pipeplan schedule``: the microbatch schedule of a plan's own stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    DeterministicOption,
    JsonOption,
    PlanArgument,
    PlanOutputOption,
    SeedOption,
    WorkersOption,
)
from planner.cli.output import print_json, say, show_plan, user_errors
from planner.search.settings import DEFAULT_WORKERS
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.search.orders.search import Schedule


SplitOption = Annotated[
    bool | None,
    typer.Option(
        "--split/--whole",
        help="let backwards run as input and weight gradients (I, W), or none of them",
        show_default="as the plan's job allows",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", metavar="SECONDS", help="stop after this time")
]


def schedule(
    path: PlanArgument,
    output: PlanOutputOption,
    split: SplitOption = None,
    time_limit: TimeLimitOption = 30.0,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find a new microbatch schedule for a plan's stages."""
    with user_errors(as_json):
        from planner.prediction import load_plan
        from planner.records.document import require_file_path
        from planner.search.orders.search import search_schedule
        from planner.search.settings import check_settings
        from planner.verification import save_valid

        check_settings(time_limit, 0.0, seed, workers)
        require_file_path(output)
        loaded = load_plan(path)
        found = search_schedule(
            loaded.problem,
            loaded.stages,
            split=loaded.job.splits if split is None else split,
            time_limit_s=time_limit,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
        )
        kept = _no_slower(loaded, found, split)
        made = _with_orders(loaded, found) if kept is None else kept
        save_valid(made, output)
        _report(found, loaded, made, output, is_kept=kept is not None, as_json=as_json)


def _no_slower(plan: Plan, found: Schedule, split: bool | None) -> Plan | None:
    """Return the plan with new predictions if its own orders are valid, wanted and no slower."""
    from planner.errors import PipeplanError
    from planner.prediction import refresh
    from planner.verification import verify

    is_split = any("I" in order for order in plan.orders.values())
    if split not in (None, is_split):
        return None
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


def _report(
    found: Schedule, before: Plan, made: Plan, output: Path, *, is_kept: bool, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "plan": str(output),
                "method": "as before" if is_kept else found.method,
                "iteration_time_s": made.predicted.iteration_time_s,
                "schedule_lower_bound_s": found.lower_bound_s,
            }
        )
        return
    show_plan(made)
    time_s, bound_s = made.predicted.iteration_time_s, found.lower_bound_s
    gap = f", gap {max(0.0, time_s / bound_s - 1):.2%}" if bound_s > 0 else ""
    found_s = format_seconds(found.iteration_time_s)
    if is_kept:
        say(
            f"the old orders stay: they take {format_seconds(time_s)}, and nothing faster was "
            f"found ({found_s} with {found.method})"
        )
    else:
        say(
            f"iteration time {found_s} with {found.method}; the old orders take "
            f"{format_seconds(before.predicted.iteration_time_s)}"
        )
    say(
        f"lower bound for every schedule of these stages {format_seconds(found.lower_bound_s)}{gap}"
    )
    say(f"wrote {output}")
