"""``pipeplan explain``: why a plan is not faster, and what changes would give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import named, print_json, print_rich, user_errors
from planner.cli.what_if import (
    ChangeOption,
    DeterministicOption,
    SeedOption,
    TimeLimitOption,
    ValueRequest,
    WhatIfOption,
    WorkersOption,
    require_changes,
    value_request,
    values_of,
)
from planner.solver_settings import DEFAULT_WORKERS

if TYPE_CHECKING:
    from planner.explain import Explanation
    from planner.what_if import WhatIf


def explain(
    path: PlanArgument,
    what_if: WhatIfOption = False,
    change: ChangeOption = None,
    time_limit: TimeLimitOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what binds a plan, what its bubble is made of, and what changes would give."""
    with user_errors(as_json):
        request = value_request(what_if, change, time_limit, seed, workers, deterministic)
        _explain(path, request, as_json=as_json)


def _explain(path: Path, request: ValueRequest, *, as_json: bool) -> None:
    """Explain a plan, then value changes if there is something to compare with."""
    from planner.artifacts.plan import Plan
    from planner.explain import explain as explain_timeline
    from planner.verifier import replay

    plan = Plan.load(path)
    with named(path):
        explanation = explain_timeline(replay(plan))
    require_changes(plan, request.changes)
    if not as_json:
        _show(explanation)
    found = None
    if request.is_asked_for or _fits(explanation):
        found = values_of(plan, explanation, request, quiet=as_json)
    if as_json:
        print_json(_data(explanation, found))
    elif found is not None:
        _show_values(found)


def _data(explanation: Explanation, found: WhatIf | None) -> dict[str, Any]:
    """For programs."""
    from planner.report.explanation import explanation_data
    from planner.report.what_if import what_if_data

    values = None if found is None else what_if_data(found)
    return {**explanation_data(explanation), "what_if": values}


def _fits(explanation: Explanation) -> bool:
    """Whether the plan keeps within memory, so that there is something to compare with."""
    return all(room.room_bytes >= 0 for room in explanation.memory.rooms)


def _show(explanation: Explanation) -> None:
    from planner.report.bubble import idle_table, stages_table
    from planner.report.explanation import explanation_lines
    from planner.report.rests_on import rests_on_lines
    from planner.rests_on import rests_on_path

    shares = rests_on_path(explanation.pipeline, explanation.critical_path)
    for line in (*explanation_lines(explanation), *rests_on_lines(shares)):
        typer.echo(line)
    print_rich(idle_table(explanation.bubble))
    print_rich(stages_table(explanation.stages))


def _show_values(found: WhatIf) -> None:
    from planner.report.what_if import what_if_lines, what_if_table

    if found.values:
        print_rich(what_if_table(found))
    for line in what_if_lines(found):
        typer.echo(line)
