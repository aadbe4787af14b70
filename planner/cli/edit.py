"""``pipeplan edit``: single changes of a plan, as ``pipeplan explain`` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument, PlanOutputOption
from planner.cli.output import print_json, say, show_plan, user_errors
from planner.units import format_seconds

if TYPE_CHECKING:
    from planner.plan.plan import Plan

MoveOption = Annotated[
    list[str],
    typer.Option(
        "--move",
        metavar="MOVE",
        help="what to change: 'move layer h.12 from stage 3 to stage 2', 'move layers h.11 to h.12 "
        "from stage 3 to stage 2', 'exchange devices n0/gpu0 and n1/gpu0', 'add replica n1/gpu0 to "
        "stage 2', 'remove replica …', 'move replica …', 'merge stages 1 and 2', 'split stage 1 "
        "before h.9', 'split stage 1 before h.9 onto n1/gpu0', 'microbatches x2', 'microbatches "
        "/2', 'recompute h.3', 'offload h.3', 'keep h.3', 'reschedule all stages'; may be "
        "repeated, one after the other",
    ),
]


def edit(
    path: PlanArgument,
    move: MoveOption,
    output: PlanOutputOption,
    as_json: JsonOption = False,
) -> None:
    """Change a plan's stages, devices, replicas or microbatch size, and predict it again."""
    with user_errors(as_json):
        from planner.analysis.changes import parse_move
        from planner.analysis.moves import apply_move
        from planner.prediction import load_plan
        from planner.records.document import require_file_path
        from planner.verification import save_valid

        moves = [parse_move(text) for text in move]
        require_file_path(output)
        plans = [load_plan(path)]
        for change in moves:
            plans.append(apply_move(plans[-1], change))
        save_valid(plans[-1], output)
        _report(plans, [str(change) for change in moves], output, as_json=as_json)


def _report(plans: Sequence[Plan], moves: Sequence[str], output: Path, *, as_json: bool) -> None:
    """Print the time before and after each change."""
    times = [plan.predicted.iteration_time_s for plan in plans]
    if as_json:
        rows = zip(moves, times[1:], strict=True)
        steps = [{"move": text, "iteration_time_s": time_s} for text, time_s in rows]
        print_json({"plan": str(output), "before_s": times[0], "moves": steps})
        return
    from planner.analysis.moves import share_saved
    from planner.report.moves import signed_change

    show_plan(plans[-1])
    for text, before_s, after_s in zip(moves, times[:-1], times[1:], strict=True):
        say(
            f"{text}: {format_seconds(before_s)} before, {format_seconds(after_s)} after "
            f"({signed_change(share_saved(after_s, before_s))})"
        )
    say(f"wrote {output}")
