"""``pipeplan explain``: what limits a plan, and which single changes would help."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.options import JsonOption, PlanArgument, RunByOption
from planner.cli.output import named, print_json, print_rich, say, user_errors

if TYPE_CHECKING:
    from planner.analysis.explain import Explanation
    from planner.analysis.moves import MovesFound
    from planner.plan.plan import Plan


def explain(path: PlanArgument, runtime: RunByOption = None, as_json: JsonOption = False) -> None:
    """Explain what limits a plan, what causes its bubble, and which changes would help."""
    with user_errors(as_json):
        from planner.analysis.explain import explain as explain_timeline
        from planner.analysis.moves import moves
        from planner.prediction import load_plan, replay

        plan = load_plan(path, runtime)
        with named(path):
            timeline = replay(plan)
            explanation = explain_timeline(timeline)
        if not as_json:
            _show(plan, explanation)
        found = moves(plan, timeline)
        if as_json:
            print_json(_data(explanation, found))
        else:
            _show_moves(plan, found, path)


def _data(explanation: Explanation, found: MovesFound) -> dict[str, Any]:
    """Return the JSON output."""
    from planner.report.explanation import explanation_data
    from planner.report.moves import moves_data

    return {**explanation_data(explanation), "moves": moves_data(found)}


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
