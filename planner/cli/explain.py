"""``pipeplan explain``: what limits a plan, which changes would help, and the plan with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument, RunByOption
from planner.cli.output import named, print_json, require_outputs, say, show, show_plan, user_errors
from planner.errors import PipeplanError
from planner.units import format_seconds

ApplyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--apply",
        metavar="MOVE",
        help="write the plan with this change to -o instead: 'begin stage 3 at h.12', 'exchange "
        "devices n0/gpu0 and n1/gpu0', 'add replica n1/gpu0 to stage 2', 'remove replica …', "
        "'move replica …', 'merge stages 1 and 2', 'split stage 1 before h.9', 'split stage 1 "
        "before h.9 onto n1/gpu0', 'reschedule all stages'; may be repeated, one after the other",
    ),
]


def explain(
    path: PlanArgument,
    apply: ApplyOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="with --apply: plan file to write")
    ] = None,
    runtime: RunByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain what limits a plan and which changes would help, or apply such changes."""
    with user_errors(as_json):
        if apply and output is not None:
            _apply(path, apply, output, runtime, as_json=as_json)
        elif apply or output is not None:
            given, lacks = ("--apply", "-o FILE") if apply else ("--output", "--apply MOVE")
            raise PipeplanError(f"{given}: has no effect alone; add {lacks}")
        else:
            _explain(path, runtime, as_json=as_json)


def _explain(path: Path, runtime: str | None, *, as_json: bool) -> None:
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


def _apply(
    path: Path, texts: Sequence[str], output: Path, runtime: str | None, *, as_json: bool
) -> None:
    """Write the changed plan, and print the time before and after each change."""
    from planner.analysis.changes import parse_move
    from planner.analysis.moves import apply_move, share_saved
    from planner.prediction import load_plan
    from planner.report.explanation import signed_share
    from planner.verification import save_valid

    changes = [parse_move(text) for text in texts]
    require_outputs({"--output": output})
    plans = [load_plan(path, runtime)]
    for change in changes:
        plans.append(apply_move(plans[-1], change))
    save_valid(plans[-1], output)
    times = [plan.predicted.iteration_time_s for plan in plans]
    if as_json:
        rows = zip(map(str, changes), times[1:], strict=True)
        steps = [{"move": text, "iteration_time_s": time_s} for text, time_s in rows]
        print_json({"plan": str(output), "before_s": times[0], "moves": steps})
        return
    show_plan(plans[-1])
    for change, before_s, after_s in zip(changes, times[:-1], times[1:], strict=True):
        say(
            f"{change}: {format_seconds(before_s)} before, {format_seconds(after_s)} after "
            f"({signed_share(-share_saved(after_s, before_s))})"
        )
    say(f"wrote {output}")
