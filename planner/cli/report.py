"""``pipeplan report``: an HTML page or a picture of plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import AgainstOption, JsonOption
from planner.cli.output import named, print_json, require_outputs, say, user_errors
from planner.errors import PipeplanError

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
    against: AgainstOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page of a plan (timeline, memory, limits, changes), or a picture of plans."""
    with user_errors(as_json):
        suffixes = {"--output": (PAGES[0], *PICTURES, *PAGES[1:])}
        require_outputs({"--output": output}, [*paths, against], suffixes)
        is_page = output.suffix.lower() in PAGES
        if memory if is_page else against:
            what = "--memory: is of a picture (.png or .svg)"
            what = what if is_page else "--against: is of a page (.html)"
            raise PipeplanError(f"{what}; name one with -o, or leave it out")
        if len(paths) > 1 and (is_page or memory):
            shown = "a page" if is_page else "--memory"
            raise PipeplanError(f"{shown} accepts exactly one plan; draw several as a .png or .svg")
        if is_page:
            _save_page(paths[0], output, against)
        else:
            _save_picture(paths, output, memory)
        if as_json:
            print_json({"plans": [str(path) for path in paths], "written": [str(output)]})
        else:
            say(f"wrote {output}")


def _save_page(path: Path, output: Path, against: Path | None) -> None:
    from planner.analysis.deviation import require_timeline_of
    from planner.measured.timeline import MeasuredTimeline
    from planner.prediction import load_plan
    from planner.report.page import save_report

    plan, measured = load_plan(path), None
    if against is not None:
        measured = MeasuredTimeline.load(against)
        with named(against):
            require_timeline_of(plan, measured)
    save_report(plan, output, measured=measured, plan_path=path)


def _save_picture(paths: Sequence[Path], output: Path, memory: bool) -> None:
    from planner.prediction import load_plan, replay
    from planner.report.gantt import save_gantts
    from planner.report.memory_plot import save_memory

    charts = []
    for path in paths:
        plan = load_plan(path)
        title = f"{plan.model.name} on {plan.cluster.name}"
        with named(path):
            # The file tells apart plans of one model on one cluster.
            charts.append((f"{path}: {title}" if len(paths) > 1 else title, replay(plan)))
    if memory:
        save_memory(charts[0][1], output)
    else:
        save_gantts(charts, output)
