"""The commands that read a plan: ``pipeplan verify | plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import print_json, tell_written, user_errors
from planner.errors import PipeplanError


def verify(path: PlanArgument, as_json: JsonOption = False) -> None:
    """Check that a plan holds; exit status 1 and the reasons if it does not."""
    with user_errors(as_json):
        from planner.artifacts.plan import Plan
        from planner.verifier import verify as find_problems

        try:
            problems = find_problems(Plan.load(path))
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
    path: PlanArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="picture to write: .png or .svg")
    ] = Path("plan.png"),
    memory: Annotated[bool, typer.Option("--memory", help="memory over time instead")] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw a plan as a Gantt chart, or its memory over time."""
    with user_errors(as_json):
        from planner.artifacts.plan import Plan
        from planner.report.gantt import save_gantt
        from planner.report.memory_plot import save_memory
        from planner.verifier import replay

        the_plan = Plan.load(path)
        timeline = replay(the_plan)
        if memory:
            save_memory(timeline, output)
        else:
            save_gantt(timeline, output, title=f"{the_plan.model.name} on {the_plan.cluster.name}")
        tell_written(path, output, as_json=as_json)
