"""The body of ``pipeplan compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from planner.artifacts.document import require_file_path, write_atomically
from planner.artifacts.problem import Problem
from planner.comparison import Row, compare, find_planners
from planner.report.comparison import comparison_data, comparison_markdown, comparison_table
from planner.solver import check_settings
from planner.units import format_seconds


def check_comparison(planners: str | None, time_limit_s: float, output: Path | None) -> None:
    """What can be wrong before the model is traced, which may take a while.

    Raises:
        PipeplanError: naming an unknown planner, a limit out of range or a path to no file.
    """
    find_planners(named(planners))
    check_settings(time_limit_s, 0.0, 0, 1)
    if output is not None:
        require_file_path(output)


def run_comparison(
    problem: Problem,
    planners: str | None,
    *,
    time_limit_s: float,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> bool:
    """Compare, show progress on stderr, print the result and write it as Markdown.

    Args:
        problem: to plan.
        planners: names with commas between them; None for all.
        time_limit_s: of our own search.
        seed: of our own search.
        output: Markdown file to write.
        as_json: print JSON instead of a table.

    Returns:
        Whether any planner found a plan.
    """
    err = Console(stderr=True)
    with err.status(f"planning for {time_limit_s:g} s") as status:

        def show(row: Row) -> None:
            time = (
                "no plan" if row.figures is None else format_seconds(row.figures.iteration_time_s)
            )
            err.print(f"{row.planner}: {time}, planned in {row.planning_s:.1f} s", highlight=False)
            status.update("classic planners")

        rows = compare(
            problem, named(planners), time_limit_s=time_limit_s, seed=seed, progress=show
        )
    title = f"{problem.graph.name} on {problem.cluster.name}"
    if output is not None:
        write_atomically(output, comparison_markdown(rows, title))
        err.print(f"wrote {output}", highlight=False)
    found = any(row.figures is not None for row in rows)
    if as_json:
        print(json.dumps(comparison_data(rows), indent=1))
        return found
    # Piped output is for reading too: do not fold the table at 80 columns.
    Console(width=None if sys.stdout.isatty() else 140).print(comparison_table(rows, title))
    return found


def named(planners: str | None) -> list[str] | None:
    """Names from a list with commas."""
    if planners is None:
        return None
    return [name.strip() for name in planners.split(",") if name.strip()]
