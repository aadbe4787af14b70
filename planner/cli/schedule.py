"""``pipeplan schedule``: the microbatch schedule of a plan's own stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument, SeedOption, WorkersOption
from planner.cli.output import print_json, show_plan, user_errors
from planner.solver_settings import DEFAULT_WORKERS
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.schedule.heuristic import Schedule


OutputOption = Annotated[Path, typer.Option("-o", "--output", help="plan file to write")]
SplitOption = Annotated[
    bool, typer.Option("--split", help="run input and weight gradients apart (I and W, not B)")
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", metavar="SECONDS", help="stop after this long")
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="the same schedule on every run and machine")
]


def schedule(
    path: PlanArgument,
    output: OutputOption,
    split: SplitOption = False,
    time_limit: TimeLimitOption = 30.0,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Order the microbatches of a plan's stages anew, as after editing the stages by hand."""
    with user_errors(as_json):
        from planner.artifacts.document import require_file_path
        from planner.artifacts.plan import Plan
        from planner.schedule.search import search_schedule
        from planner.solver import check_settings

        check_settings(time_limit, 0.0, seed, workers)
        require_file_path(output)
        loaded = Plan.load(path)
        found = search_schedule(
            loaded.problem,
            loaded.stages,
            split=split,
            time_limit_s=time_limit,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
        )
        made = _with_orders(loaded, found)
        made.save(output)
        _report(found, loaded, made, output, as_json)


def _with_orders(plan: Plan, found: Schedule) -> Plan:
    """The plan in the schedule's orders, with fresh predictions."""
    from planner.artifacts.operations import format_order
    from planner.assemble import refresh

    orders = {device: format_order(list(order)) for device, order in found.orders.items()}
    return refresh(plan.model_copy(update={"orders": orders}))


def _report(found: Schedule, before: Plan, made: Plan, output: Path, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "plan": str(output),
                "method": found.method,
                "iteration_time_s": found.iteration_time_s,
                "schedule_lower_bound_s": found.lower_bound_s,
            }
        )
        return
    show_plan(made)
    gap = f", gap {found.gap:.2%}" if found.gap is not None else ""
    typer.echo(
        f"{format_seconds(found.iteration_time_s)} an iteration by {found.method}; the file's "
        f"orders were predicted to take {format_seconds(before.predicted.iteration_time_s)}"
    )
    typer.echo(
        f"no schedule of these stages takes less than {format_seconds(found.lower_bound_s)}{gap}"
    )
    typer.echo(f"wrote {output}")
