"""``pipeplan explain``: what limits a plan, and which single changes would help."""

from __future__ import annotations

from planner.cli.options import JsonOption, PlanArgument, RunByOption
from planner.cli.output import named, print_json, show, user_errors


def explain(path: PlanArgument, runtime: RunByOption = None, as_json: JsonOption = False) -> None:
    """Explain what limits a plan, what causes its bubble, and which changes would help."""
    with user_errors(as_json):
        from planner.analysis.explain import explain as explain_timeline
        from planner.analysis.moves import moves
        from planner.prediction import load_plan, replay
        from planner.report.explanation import explanation_data, explanation_view
        from planner.report.moves import moves_data, moves_view

        plan = load_plan(path, runtime)
        with named(path):
            timeline = replay(plan)
            explanation = explain_timeline(timeline)
        if not as_json:
            show(*explanation_view(plan, explanation))
        found = moves(plan, timeline)
        if as_json:
            print_json({**explanation_data(explanation), "moves": moves_data(found)})
        else:
            show(*moves_view(plan, found, str(path)))
