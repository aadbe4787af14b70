"""``pipeplan explain``: why a plan is not faster, and what changes would give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import print_json, print_rich, user_errors
from planner.errors import PipeplanError
from planner.solver_settings import DEFAULT_WORKERS
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.explain import Explanation
    from planner.what_if import WhatIf
    from planner.what_if.values import Progress

TIME_LIMIT_S = 60.0


def explain(
    path: PlanArgument,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="solve anew under each change, instead of replays and quick schedules"
        ),
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="CHANGE",
            help="value this change instead of the usual ones, such as 'link n0-tor bandwidth x2', "
            "'device n1/gpu3 memory x1.2', 'type A10 speed +20%', 'recompute h.3', 'keep h.3', "
            "'microbatches x2', 'another n0/gpu0'; may be repeated",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            help=f"of --what-if, all changes together; {TIME_LIMIT_S:g} by default",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="of --what-if's solver")] = 0,
    workers: Annotated[
        int, typer.Option("--workers", help="solver threads of --what-if")
    ] = DEFAULT_WORKERS,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="the same answer on every run and machine")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what binds a plan, what its bubble is made of, and what changes would give."""
    with user_errors():
        from planner.artifacts.plan import Plan
        from planner.explain import explain as explain_timeline
        from planner.report.explanation import explanation_data
        from planner.report.what_if import what_if_data
        from planner.solver import check_settings
        from planner.verifier import replay
        from planner.what_if import parse_change
        from planner.what_if import what_if as value_changes
        from planner.what_if.altered import alter_each, unaltered

        if time_limit is not None and not what_if:
            raise PipeplanError("--time-limit: only --what-if searches; add it")
        limit_s = TIME_LIMIT_S if time_limit is None else time_limit
        check_settings(limit_s, 0.0, seed, workers)
        changes = [parse_change(text) for text in change or ()]
        plan = Plan.load(path)
        explanation = explain_timeline(replay(plan))
        # What is wrong with them is told before a search that takes its time.
        alter_each(unaltered(plan), changes)
        if not as_json:
            _show(explanation)
        found = None
        if what_if or changes or _fits(explanation):
            found = value_changes(
                plan,
                changes or None,
                solve_anew=what_if,
                time_limit_s=limit_s,
                seed=seed,
                workers=workers,
                deterministic=deterministic,
                progress=None if as_json else _tell,
            )
        if as_json:
            values = None if found is None else what_if_data(found)
            print_json({**explanation_data(explanation), "what_if": values})
        elif found is not None:
            _show_values(found)


def _fits(explanation: Explanation) -> bool:
    """Whether the plan keeps within memory, so that there is something to compare with."""
    return all(room.room_bytes >= 0 for room in explanation.memory.rooms)


def _show(explanation: Explanation) -> None:
    from planner.report.bubble import idle_table, stages_table
    from planner.report.explanation import explanation_lines
    from planner.report.rests_on import rests_on_lines
    from planner.rests_on import rests_on_path

    shares = rests_on_path(explanation.pipeline, explanation.critical_path)
    for line in (*explanation_lines(explanation), *rests_on_lines(shares)):
        typer.echo(line)
    print_rich(idle_table(explanation.bubble))
    print_rich(stages_table(explanation.stages))


def _show_values(found: WhatIf) -> None:
    from planner.report.what_if import what_if_lines, what_if_table

    if found.values:
        print_rich(what_if_table(found))
    for line in what_if_lines(found):
        typer.echo(line)


def _tell(row: Progress) -> None:
    """A line for each step of a search."""
    time = "nothing fits" if row.iteration_time_s is None else format_seconds(row.iteration_time_s)
    typer.echo(
        f"{row.elapsed_s:7.1f}s  {row.step:>9}  {time:>12}  {row.change or 'no change'}", err=True
    )
