"""``pipeplan report``: an HTML page or a picture of plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import AgainstOption, JsonOption
from planner.cli.output import keep_inputs, named, print_json, say, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.measured.timeline import MeasuredTimeline
    from planner.plan.plan import Plan
    from planner.simulation.timeline import Timeline

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg")


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PLAN...", help="plan files; several are drawn on one time scale"),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="page to write (.html), or picture of the timeline (.png or .svg)",
        ),
    ] = Path("plan.html"),
    memory: Annotated[
        bool, typer.Option("--memory", help="picture: draw memory over time instead")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="START:END",
            help="picture: the part of the iteration to draw, in seconds, such as 0.1:0.2",
        ),
    ] = None,
    against: AgainstOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page of a plan (timeline, memory, limits, changes), or a picture of plans."""
    with user_errors(as_json):
        from planner.prediction import load_plan

        is_page = output.suffix.lower() in PAGES
        _require_possible(output, is_page, paths, memory, window, against)
        keep_inputs(output, [*paths, *([against] if against else [])])
        plans = [load_plan(path) for path in paths]
        if is_page:
            _save_page(plans[0], paths[0], output, against)
        else:
            _save_picture(plans, paths, output, memory, window)
        if as_json:
            print_json({"plans": [str(path) for path in paths], "written": [str(output)]})
        else:
            say(f"wrote {output}")


def _require_possible(
    output: Path,
    is_page: bool,
    paths: Sequence[Path],
    memory: bool,
    window: str | None,
    against: Path | None,
) -> None:
    """Refuse options without effect, and an output that cannot be written."""
    from planner.records.document import require_file_path

    if output.suffix.lower() not in (*PAGES, *PICTURES):
        expected = ", ".join((PAGES[0], *PICTURES))
        raise PipeplanError(f"--output {output}: expected a name that ends in {expected}")
    of_picture = {"--memory": memory, "--window": window}
    given = of_picture if is_page else {"--against": against}
    for option, value in given.items():
        if value:
            kind = "picture (.png or .svg)" if is_page else "page (.html)"
            raise PipeplanError(f"{option}: is of a {kind}; name one with -o, or leave it out")
    if len(paths) > 1 and (is_page or memory or window):
        shown = "a page" if is_page else "--memory" if memory else "--window"
        raise PipeplanError(f"{shown} accepts exactly one plan; draw several as a .png or .svg")
    require_file_path(output)


def _save_page(plan: Plan, path: Path, output: Path, against: Path | None) -> None:
    from planner.report.page import save_report

    measured = None if against is None else _measured(plan, against)
    save_report(plan, output, measured=measured, plan_path=path)


def _save_picture(
    plans: Sequence[Plan], paths: Sequence[Path], output: Path, memory: bool, window: str | None
) -> None:
    from planner.report.figures import root_figure, save_figure
    from planner.report.gantt import plot_gantt, save_gantts
    from planner.report.memory_plot import save_memory

    charts = [_chart(plan, path, len(plans)) for plan, path in zip(plans, paths, strict=True)]
    title, timeline = charts[0]
    if memory:
        save_memory(timeline, output)
    elif window is not None:
        figure = root_figure(plot_gantt(timeline, title=title, window_s=_seconds(window)))
        save_figure(figure, output)
    else:
        save_gantts(charts, output)


def _chart(plan: Plan, path: Path, count: int) -> tuple[str, Timeline]:
    """Return title and timeline; the file tells apart plans of one model on one cluster."""
    from planner.prediction import replay

    title = f"{plan.model.name} on {plan.cluster.name}"
    with named(path):
        return (f"{path}: {title}" if count > 1 else title), replay(plan)


def _seconds(window: str) -> tuple[float, float]:
    start, _, end = window.partition(":")
    try:
        return float(start), float(end)
    except ValueError:
        raise PipeplanError(
            f"--window {window}: expected two times in seconds, such as 0.1:0.2"
        ) from None


def _measured(plan: Plan, path: Path) -> MeasuredTimeline:
    """Load a measurement, and check that it is of this plan."""
    from planner.analysis.deviation import require_timeline_of
    from planner.measured.timeline import MeasuredTimeline

    measured = MeasuredTimeline.load(path)
    with named(path):
        require_timeline_of(plan, measured)
    return measured
