"""What ``pipeplan plan`` prints: progress while it searches, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.output import print_json, show_plan
from planner.cli.sync import needs_pipelines
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan
    from planner.result import HistoryRow, Result


def show_result(result: Result, output: Path, text_problem: str | None, *, as_json: bool) -> None:
    """Print a result whose plan was written.

    Args:
        result: of the search.
        output: where its plan lies.
        text_problem: why the executor's text cannot train the model, if that is known.
        as_json: print JSON.
    """
    if as_json:
        print_json(_data(result, output))
        return
    show_plan(result.plan)
    typer.echo(result.summary())
    _tell_unjoined(result.unjoined_devices)
    typer.echo(f"the bound holds for {result.plan.provenance.bound_covers}")
    about_gap = _about_gap(result)
    if about_gap is not None:
        typer.echo(about_gap)
    typer.echo(f"wrote {output}")
    tell_command(result.plan, output, text_problem)


def _data(result: Result, output: Path) -> dict[str, Any]:
    """For programs."""
    return {
        "status": result.status,
        "ended": result.ended,
        "plan": str(output),
        **result.plan.predicted.model_dump(mode="json"),
        "unjoined_devices": list(result.unjoined_devices),
        "robustness": None if result.robustness is None else asdict(result.robustness),
        "history": [row._asdict() for row in result.history],
    }


def _tell_unjoined(devices: Sequence[str]) -> None:
    """Say which devices the plan had no way to use with the others."""
    from planner.report.names import compress_devices

    if devices:
        typer.echo(
            f"note: no path of links and switches joins {compress_devices(devices)} to a device "
            f"in use: {plural(len(devices), 'device')} left unused; add links to the cluster file "
            "to use more"
        )


def _about_gap(result: Result) -> str | None:
    """What a gap may come from; None where there is none."""
    if result.robustness is not None and not result.robustness.is_fastest:
        return "the gap counts from the plan's own time; a faster plan is known, less robust"
    if needs_pipelines(result.plan.sync.strategy):
        return (
            "the time is that of pipelines in step, the bound one on plans of any form: the gap "
            "also holds what it costs to have pipelines"
        )
    if result.status != "optimal" and result.gap is not None:
        return "the gap is what is not proved: a better plan may exist, none is known"
    return None


def tell_command(plan: Plan, output: Path, text_problem: str | None) -> None:
    """Say how a plan is run, and on what data, if its model is known."""
    from planner.run_command import data_line, run_command

    command = run_command(plan, output, text_problem)
    if command is not None:
        typer.echo(f"to run it on one host: {command}")
        typer.echo(data_line(text_problem))


def progress_table(quiet: bool) -> Callable[[HistoryRow], None]:
    """Prints rows of progress as they come, below a heading."""
    if quiet:
        return lambda row: None
    headings = [f"{'time':>8}  {'iteration':>12}  {'bound':>12}  {'gap':>7}"]

    def show(row: HistoryRow) -> None:
        while headings:
            typer.echo(headings.pop(), err=True)
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        time, bound = format_seconds(row.iteration_time_s), format_seconds(row.lower_bound_s)
        typer.echo(f"{row.time_s:7.1f}s  {time:>12}  {bound:>12}  {gap}  {row.event}", err=True)

    return show
