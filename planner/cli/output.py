"""Printing: tables, JSON, and what is wrong with the input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan


@contextmanager
def user_errors() -> Iterator[None]:
    """Print what is wrong with the input, without a traceback."""
    try:
        yield
    except PipeplanError as error:
        for problem in error.problems:
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as interrupt:
        typer.echo(f"interrupted {interrupt}".rstrip(), err=True)
        raise typer.Exit(130) from None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Put a file's name before what is wrong with its contents."""
    try:
        yield
    except PipeplanError as error:
        raise PipeplanError(f"{path}: {problem}" for problem in error.problems) from None


def show_plan(the_plan: Plan) -> None:
    """Print a plan's stages, devices and figures."""
    from planner.report.summary import plan_tables
    from planner.simulator import simulate_plan

    print_rich(plan_tables(the_plan, simulate_plan(the_plan)))


def show_fair_links(the_plan: Plan) -> None:
    """Print what links that share would do to a plan with fresh predictions, if it matters."""
    from planner.fair_links import simulate_plan_fair_links
    from planner.report.summary import fair_links_line

    shared_s = simulate_plan_fair_links(the_plan).iteration_time_s
    line = fair_links_line(the_plan.predicted.iteration_time_s, shared_s)
    if line is not None:
        typer.echo(line)


def print_rich(renderable: Any) -> None:
    """Print a table or a group of tables."""
    from rich.console import Console

    # Piped output is for reading too: do not fold tables at 80 columns.
    Console(width=None if sys.stdout.isatty() else 120).print(renderable)


def print_json(data: Any) -> None:
    """Print plain data for programs."""
    typer.echo(json.dumps(data, indent=1))
