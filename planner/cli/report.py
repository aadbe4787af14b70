"""``pipeplan report``: an HTML page about a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.models import with_epoch
from planner.cli.options import (
    AgainstOption,
    EpochOption,
    JsonOption,
    PlanArgument,
)
from planner.cli.output import console, named, print_written, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.analysis.comparison import PlannerComparison
    from planner.measured.timeline import MeasuredTimeline
    from planner.plan.plan import Plan


OutputOption = Annotated[Path, typer.Option("-o", "--output", help="page to write: .html")]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="also compare with the baselines; takes a while")
]


def report(
    path: PlanArgument,
    output: OutputOption = Path("plan.html"),
    against: AgainstOption = None,
    compare: CompareOption = False,
    epoch_samples: EpochOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report of a plan: timeline, memory, limits and possible improvements."""
    with user_errors(as_json):
        _check_output(output, path, against)
        _report(path, output, against, compare, epoch_samples)
        print_written([path], output, as_json=as_json)


def _report(
    path: Path,
    output: Path,
    against: Path | None,
    compare: bool,
    epoch_samples: int | None,
) -> None:
    """Compare as requested, and write the page."""
    from planner.prediction import load_plan
    from planner.report.page import save_report

    plan = load_plan(path)
    plan = plan.model_copy(update={"job": with_epoch(plan.job, epoch_samples)})
    measured = None if against is None else _measured(plan, against)
    rows = _compared(plan) if compare else None
    save_report(plan, output, measured=measured, comparison=rows, plan_path=path)


def _check_output(output: Path, *inputs: Path | None) -> None:
    """Refuse a page that cannot be written or would replace an input."""
    from planner.records.document import require_file_path

    if output.suffix.lower() not in (".html", ".htm"):
        raise PipeplanError(f"--output {output}: expected a name that ends in .html")
    if output.resolve() in [path.resolve() for path in inputs if path is not None]:
        raise PipeplanError(
            f"--output {output}: used for another file of this command; choose another name"
        )
    require_file_path(output)


def _measured(plan: Plan, path: Path) -> MeasuredTimeline:
    """Load a measurement, and check that it is of this plan."""
    from planner.analysis.deviation import require_timeline_of
    from planner.measured.timeline import MeasuredTimeline

    measured = MeasuredTimeline.load(path)
    with named(path):
        require_timeline_of(plan, measured)
    return measured


def _compared(plan: Plan) -> PlannerComparison:
    """Run the baselines, with a line on stderr as each is done."""
    from planner.analysis.comparison import compare_plan

    shown = console(stderr=True)
    with shown.status("baselines"):
        return compare_plan(
            plan,
            progress=lambda row: shown.print(
                f"{row.planner}: planned in {row.planning_s:.1f} s", highlight=False, markup=False
            ),
        )
