"""The commands that read a plan: ``pipeplan verify | plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import named, print_json, tell_written, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.simulator import Timeline


def verify(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Check that a plan holds; exit status 1 and the reasons if it does not."""
    with user_errors(as_json):
        from planner.artifacts.plan import Plan
        from planner.verifier import require_valid

        problems: list[str] = []
        try:
            require_valid(Plan.load(path), str(path))
        except PipeplanError as error:
            problems = list(error.problems)
        if as_json:
            print_json({"plan": str(path), "valid": not problems, "problems": problems})
        elif problems:
            raise PipeplanError(problems)
        else:
            typer.echo(f"{path}: holds")
        if problems:
            raise typer.Exit(1)


def plot(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PLAN...", help="plan files; several are drawn on one scale"),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="picture to write: .png or .svg")
    ] = Path("plan.png"),
    memory: Annotated[bool, typer.Option("--memory", help="memory over time instead")] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw plans as Gantt charts below each other, or one plan's memory over time."""
    with user_errors(as_json):
        from planner.artifacts.plan import Plan
        from planner.report.gantt import save_gantts
        from planner.report.memory_plot import save_memory
        from planner.verifier import replay

        if memory and len(paths) > 1:
            raise PipeplanError("--memory: it draws one plan; name one")
        plans = [Plan.load(path) for path in paths]
        if memory:
            with named(paths[0]):
                save_memory(replay(plans[0]), output)
        else:
            save_gantts(_charts(paths, plans), output)
        tell_written(paths, output, as_json=as_json)


def _charts(paths: Sequence[Path], plans: Sequence[Plan]) -> list[tuple[str, Timeline]]:
    """Titles and timelines; the file tells apart plans of one model on one cluster."""
    from planner.verifier import replay

    titles = [f"{plan.model.name} on {plan.cluster.name}" for plan in plans]
    if len(plans) > 1:
        titles = [f"{path}: {title}" for path, title in zip(paths, titles, strict=True)]
    charts = []
    for path, title, plan in zip(paths, titles, plans, strict=True):
        with named(path):
            charts.append((title, replay(plan)))
    return charts
