"""``pipeplan report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import completion
from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import named, tell_written, user_errors
from planner.cli.what_if import (
    ChangeOption,
    DeterministicOption,
    SeedOption,
    TimeLimitOption,
    ValueRequest,
    WhatIfOption,
    WorkersOption,
    value_request,
    values_of,
)
from planner.errors import PipeplanError
from planner.solver_settings import DEFAULT_WORKERS

if TYPE_CHECKING:
    from planner.artifacts.measured import MeasuredTimeline
    from planner.artifacts.plan import Plan
    from planner.comparison import Row
    from planner.what_if import WhatIf


OutputOption = Annotated[Path, typer.Option("-o", "--output", help="page to write: .html")]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="MEASURED",
        help="show a timeline that the executor wrote (--timeline) beneath",
        autocompletion=completion.plans,
    ),
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="plan with the classic planners too; takes a while")
]


def report(
    path: PlanArgument,
    output: OutputOption = Path("plan.html"),
    against: AgainstOption = None,
    compare: CompareOption = False,
    what_if: WhatIfOption = False,
    change: ChangeOption = None,
    time_limit: TimeLimitOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as one page for a browser: timeline, memory, what binds and what would help."""
    with user_errors(as_json):
        request = value_request(what_if, change, time_limit, seed, workers, deterministic)
        _check_output(output, path, against)
        _report(path, output, against, compare, request)
        tell_written([path], output, as_json=as_json)


def _report(
    path: Path, output: Path, against: Path | None, compare: bool, request: ValueRequest
) -> None:
    """Read, value and compare what is asked for, and write the page."""
    from planner.artifacts.plan import Plan
    from planner.report.html import save_report

    plan = Plan.load(path)
    measured = None if against is None else _measured(plan, against)
    values = _values(plan, request) if request.is_asked_for else None
    rows = _compared(plan) if compare else None
    save_report(plan, output, measured=measured, comparison=rows, values=values, plan_path=path)


def _values(plan: Plan, request: ValueRequest) -> WhatIf:
    """What the changes would give that are asked for."""
    from planner.explain import explain
    from planner.verifier import replay

    return values_of(plan, explain(replay(plan)), request)


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
