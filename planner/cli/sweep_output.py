"""What ``pipeplan sweep`` prints: a line a point while it solves them, then table and chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli.output import print_json, print_rich
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.sweeping import SweepResult, SweepRow
    from planner.sweeping.run import SweepProgress


@contextmanager
def shown_progress(
    limit: str, folder: Path, *, quiet: bool
) -> Iterator[Callable[[SweepProgress], None]]:
    """A line on stderr for each point, and a bar below where that is a terminal.

    Args:
        limit: of a point, such as ``10 s``.
        folder: of the sweep.
        quiet: show nothing.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if quiet:
        yield lambda progress: None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("points"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("points", total=None)

        def show(progress: SweepProgress) -> None:
            line = _start_line(progress, limit, folder) if progress.row is None else _line(progress)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, total=progress.total, completed=progress.done)

        yield show


def _start_line(progress: SweepProgress, limit: str, folder: Path) -> str:
    left = progress.total - progress.done
    there = f", {progress.done} of them in {folder} already" if progress.done else ""
    return f"{plural(progress.total, 'point')}{there}; {left} to solve, of up to {limit} each"


def _line(progress: SweepProgress) -> str:
    assert progress.row is not None, "of a point"
    return f"{progress.done}/{progress.total} {progress.row.point}: {_outcome(progress.row)}"


def _outcome(row: SweepRow) -> str:
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return f"no plan: {row.reason}"
    gap = "" if row.gap is None else f", gap {row.gap:.2%}"
    return (
        f"{format_seconds(row.iteration_time_s)} an iteration, "
        f"{format_seconds(row.time_per_sample_s)} a sample on "
        f"{plural(row.devices_used or 0, 'device')}{gap}"
    )


def show_sweep(result: SweepResult, *, as_json: bool) -> None:
    """Print the table, or all figures as JSON."""
    from planner.report.sweep import sweep_data, sweep_lines, sweep_table

    if as_json:
        print_json(sweep_data(result))
        return
    if result.rows:
        print_rich(sweep_table(result))
    for line in sweep_lines(result):
        typer.echo(line)
    typer.echo(f"plans and index in {result.folder}")
    if result.others:
        typer.echo(f"the folder has {plural(result.others, 'point')} more that were not asked for")


def draw_sweep(result: SweepResult, path: Path) -> None:
    """Write the chart, if there is anything to draw."""
    from planner.report.sweep_plot import save_sweep_plot

    if all(row.plan is None for row in result.rows):
        typer.echo(f"note: {path} is not drawn: no point has a plan", err=True)
        return
    save_sweep_plot(result, path)
    typer.echo(f"wrote {path}", err=True)
