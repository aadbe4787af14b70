"""``pipeplan explain``, with the options and the evaluation of changes that reports share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import DeterministicOption, JsonOption, PlanArgument, RunByOption
from planner.cli.output import named, print_json, print_rich, say, user_errors
from planner.errors import PipeplanError
from planner.search.settings import DEFAULT_WORKERS
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.analysis.explain import Explanation
    from planner.analysis.moves import MovesFound
    from planner.analysis.what_if.values import WhatIf, WhatIfProgress
    from planner.plan.plan import Plan
    from planner.simulation.timeline import Timeline
    from planner.variants.changes import Change


TIME_LIMIT_S = 60.0

WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="search for a new plan under each change, instead of replays and quick schedules",
    ),
]
ChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="CHANGE",
        help="evaluate this change instead of the usual ones, such as 'link n0-tor bandwidth x2', "
        "'device n1/gpu3 memory x1.2', 'type A10 speed +20%', 'recompute h.3', 'keep h.3', "
        "'microbatches x2', 'another n0/gpu0', 'without split', 'with chunks'; may be repeated",
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help=f"time limit of --what-if for all changes together (default: {TIME_LIMIT_S:g})",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="seed of --what-if")]
WorkersOption = Annotated[int, typer.Option("--workers", help="solver threads of --what-if")]


@dataclass(frozen=True)
class ValueRequest:
    """The changes to evaluate and the search settings of :func:`planner.analysis.what_if.what_if`.

    Attributes:
        changes: the usual ones if there are none.
        solve_anew, time_limit_s, seed, workers, deterministic: of the search.
    """

    changes: tuple[Change, ...]
    solve_anew: bool
    time_limit_s: float
    seed: int
    workers: int
    deterministic: bool

    @property
    def is_asked_for(self) -> bool:
        """Whether an option asks for an evaluation beyond the quick default one."""
        return self.solve_anew or bool(self.changes)


def value_request(
    solve_anew: bool,
    changes: Sequence[str] | None,
    time_limit_s: float | None,
    seed: int,
    workers: int,
    deterministic: bool,
) -> ValueRequest:
    """Return the request that the options describe.

    Raises:
        PipeplanError: naming a setting out of range, or a change that cannot be read.
    """
    from planner.search.settings import check_settings
    from planner.variants.changes import parse_change

    if time_limit_s is not None and not solve_anew:
        raise PipeplanError("--time-limit: only has an effect with --what-if; add that option")
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    check_settings(limit_s, 0.0, seed, workers)
    parsed = tuple(parse_change(text) for text in changes or ())
    return ValueRequest(parsed, solve_anew, limit_s, seed, workers, deterministic)


def require_changes(plan: Plan, changes: Sequence[Change]) -> None:
    """Refuse impossible changes before a search that takes long.

    Raises:
        PipeplanError: naming every change that cannot be made.
    """
    from planner.analysis.what_if.altered import alter_each, unaltered

    alter_each(unaltered(plan), changes)


def values_of(
    plan: Plan,
    timeline: Timeline,
    explanation: Explanation,
    request: ValueRequest,
    *,
    quiet: bool = False,
) -> WhatIf:
    """Evaluate the requested changes, or the usual ones.

    Args:
        plan: that fits memory.
        timeline: its replay.
        explanation: of that.
        request: what is asked for.
        quiet: no line on stderr for each step of a search.

    Raises:
        PipeplanError: if the plan overflows memory.
    """
    from planner.analysis.what_if.candidates import default_changes
    from planner.analysis.what_if.search import what_if

    usual = default_changes(plan, explanation, solve_anew=request.solve_anew)
    return what_if(
        plan,
        request.changes or usual,
        solve_anew=request.solve_anew,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        workers=request.workers,
        deterministic=request.deterministic,
        progress=None if quiet else _print_progress,
        timeline=timeline,
    )


def _print_progress(row: WhatIfProgress) -> None:
    """Print a line for each step of a search."""
    time = "nothing fits" if row.iteration_time_s is None else format_seconds(row.iteration_time_s)
    say(f"{row.elapsed_s:7.1f}s  {row.step:>9}  {time:>12}  {row.change or 'no change'}", err=True)


def explain(
    path: PlanArgument,
    what_if: WhatIfOption = False,
    change: ChangeOption = None,
    time_limit: TimeLimitOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    runtime: RunByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain what limits a plan, what causes its bubble, and which changes would help."""
    with user_errors(as_json):
        request = value_request(what_if, change, time_limit, seed, workers, deterministic)
        _explain(path, request, runtime, as_json=as_json)


def _explain(path: Path, request: ValueRequest, runtime: str | None, *, as_json: bool) -> None:
    """Explain a plan, list its single changes, and evaluate others if it fits in memory."""
    from planner.analysis.explain import explain as explain_timeline
    from planner.analysis.moves import moves
    from planner.prediction import load_plan, replay

    plan = load_plan(path, runtime)
    with named(path):
        timeline = replay(plan)
        explanation = explain_timeline(timeline)
    require_changes(plan, request.changes)
    if not as_json:
        _show(plan, explanation)
    single = moves(plan, timeline)
    if not as_json:
        _show_moves(plan, single, path)
    found = None
    if request.is_asked_for or _fits(explanation):
        found = values_of(plan, timeline, explanation, request, quiet=as_json)
    if as_json:
        print_json(_data(explanation, single, found))
    elif found is not None:
        _show_values(found)


def _data(explanation: Explanation, single: MovesFound, found: WhatIf | None) -> dict[str, Any]:
    """Return the JSON output."""
    from planner.report.explanation import explanation_data
    from planner.report.moves import moves_data
    from planner.report.what_if import what_if_data

    values = None if found is None else what_if_data(found)
    return {**explanation_data(explanation), "moves": moves_data(single), "what_if": values}


def _fits(explanation: Explanation) -> bool:
    """Return whether the plan fits in memory, so that changes can be compared with it."""
    return all(room.room_bytes >= 0 for room in explanation.memory.rooms)


def _show(plan: Plan, explanation: Explanation) -> None:
    from planner.report.bubble import idle_table, stages_table
    from planner.report.explanation import explanation_lines, parts_table
    from planner.report.summary import length_lines, time_provenance_lines
    from planner.simulation.time_provenance import path_time_provenance

    shares = path_time_provenance(explanation.pipeline, explanation.critical_path)
    lines = (*explanation_lines(explanation), *time_provenance_lines(shares), *length_lines(plan))
    for line in lines:
        say(line)
    print_rich(parts_table(explanation))
    print_rich(idle_table(explanation.bubble))
    print_rich(stages_table(explanation.stages))


def _show_moves(plan: Plan, single: MovesFound, path: Path) -> None:
    from planner.report.moves import moves_lines, moves_table

    if single.best is not None:
        print_rich(moves_table(single))
    for line in moves_lines(plan, single, shlex.quote(str(path))):
        say(line)


def _show_values(found: WhatIf) -> None:
    from planner.report.what_if import what_if_lines, what_if_table

    if found.values:
        print_rich(what_if_table(found))
    for line in what_if_lines(found):
        say(line)
