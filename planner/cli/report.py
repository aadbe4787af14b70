"""``pipeplan report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import PlanArgument
from planner.cli.output import named, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.measured import MeasuredTimeline
    from planner.artifacts.plan import Plan
    from planner.comparison import Row


def report(
    path: PlanArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="page to write: .html")] = Path(
        "plan.html"
    ),
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="MEASURED",
            help="show a timeline that the executor wrote (--timeline) beneath",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="plan with the classic planners too; takes a while"),
    ] = False,
) -> None:
    """Write a plan as one page for a browser: timeline, memory, what binds, cluster, costs."""
    with user_errors():
        from planner.artifacts.plan import Plan
        from planner.report.html import save_report

        _check_output(output, path, against)
        plan = Plan.load(path)
        measured = None if against is None else _measured(plan, against)
        rows = _compared(plan) if compare else None
        save_report(plan, output, measured=measured, comparison=rows, plan_path=path)
        typer.echo(f"wrote {output}")


def _check_output(output: Path, *inputs: Path | None) -> None:
    """Refuse what cannot be written, or would be written over what is read."""
    from planner.artifacts.document import require_file_path

    if output.suffix.lower() not in (".html", ".htm"):
        raise PipeplanError(f"--output {output}: expected a name that ends in .html")
    if output.resolve() in [path.resolve() for path in inputs if path is not None]:
        raise PipeplanError(f"--output {output}: is another file of this command; choose another")
    require_file_path(output)


def _measured(plan: Plan, path: Path) -> MeasuredTimeline:
    """A measurement of this plan and of no other."""
    from planner.artifacts.measured import MeasuredTimeline
    from planner.deviation import require_timeline_of

    measured = MeasuredTimeline.load(path)
    with named(path):
        require_timeline_of(plan, measured)
    return measured


def _compared(plan: Plan) -> tuple[Row, ...]:
    """The classic planners' plans, with a line on stderr as each is done."""
    from rich.console import Console

    from planner.comparison import compare_plan

    console = Console(stderr=True)
    with console.status("classic planners"):
        return compare_plan(
            plan,
            progress=lambda row: console.print(
                f"{row.planner}: planned in {row.planning_s:.1f} s", highlight=False, markup=False
            ),
        )
