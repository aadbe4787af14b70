"""``pipeplan compare``: Pipeplan and the baselines in one simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    ClusterOption,
    DeterministicOption,
    JobOption,
    JsonOption,
    MemoryMarginOption,
    ModelArgument,
    RuntimeOption,
    SetOption,
    TimeLimitOption,
)
from planner.cli.output import console, print_json, require_outputs, say, show, user_errors
from planner.cli.problems import ProblemFiles
from planner.errors import PipeplanError
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.analysis.comparison import ComparisonRow, PlannerComparison


def compare(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    planners: Annotated[
        str | None,
        typer.Option(
            "--planners", metavar="NAME,…", help="baselines, separated by commas (default: all)"
        ),
    ] = None,
    time_limit: TimeLimitOption = 30.0,
    deterministic: DeterministicOption = False,
    runtime: RuntimeOption = None,
    memory_margin: MemoryMarginOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="also write the table as Markdown")
    ] = None,
    best_baseline: Annotated[
        Path | None,
        typer.Option(
            "--best-baseline", metavar="FILE", help="write the fastest baseline's plan to this file"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare Pipeplan with the baselines (published planners) in one simulator."""
    with user_errors(as_json):
        from planner.analysis.comparison import compare as compare_planners
        from planner.analysis.comparison import find_planners
        from planner.search.settings import check_settings

        # What can be wrong is found before the model is traced, which may take a while.
        names = None if planners is None else [name.strip() for name in planners.split(",")]
        names = names and [name for name in names if name]
        find_planners(names)
        check_settings(time_limit, 0.0, 0, 1)
        outputs = {"--output": output, "--best-baseline": best_baseline}
        files = ProblemFiles(
            model, cluster, job, set_ or (), runtime=runtime, memory_margin=memory_margin
        )
        require_outputs(outputs, files.inputs)
        search = partial(
            compare_planners,
            files.load().problem,
            names,
            time_limit_s=time_limit,
            deterministic=deterministic,
        )
        rows = _compared(search, time_limit)
        _report(rows, output, as_json)
        if best_baseline is not None:
            _save_best_baseline(rows, best_baseline)
        if all(row.figures is None for row in rows):
            raise typer.Exit(1)


def _compared(search: Callable[..., PlannerComparison], time_limit_s: float) -> PlannerComparison:
    """Compare, with a line on stderr as each planner is done."""
    shown = console(stderr=True)
    # Each refresh of the spinner takes time from the search, whose bound would be lower for it.
    text = f"planning for {time_limit_s:g} s"
    with shown.status(text, refresh_per_second=1) as status:

        def show_row(row: ComparisonRow) -> None:
            figures = row.figures
            time = "no plan" if figures is None else format_seconds(figures.iteration_time_s)
            line = f"{row.planner}: {time}, planned in {row.planning_s:.1f} s"
            shown.print(line, highlight=False, markup=False)
            status.update("baselines")

        return search(progress=show_row)


def _save_best_baseline(rows: PlannerComparison, path: Path) -> None:
    from planner.analysis.comparison import best_baseline, plan_of_row

    row = best_baseline(rows)
    if row is None:
        raise PipeplanError("--best-baseline: no baseline has a plan that fits")
    plan_of_row(rows.problem, row).save(path)
    say(f"wrote {path}: {row.planner}, {row.schedule}", err=True)


def _report(rows: PlannerComparison, output: Path | None, as_json: bool) -> None:
    from planner.records.document import write_atomically
    from planner.report.comparison import comparison_data, comparison_table

    table = comparison_table(rows, rows.title)
    if as_json:
        print_json(comparison_data(rows))
    else:
        show(table)
    if output is not None:
        write_atomically(output, f"# {table.title}\n\n{table.markdown()}")
        say(f"wrote {output}", err=True)
