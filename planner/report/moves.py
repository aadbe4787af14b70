"""Single changes of a plan: a table, lines and plain data."""

from __future__ import annotations

import shlex
from typing import Any

from planner.analysis.moves import LEAST_GAIN, MovesFound, TimedMove
from planner.plan.plan import Plan
from planner.report.explanation import signed_share
from planner.report.tables import Table, View
from planner.units import format_bytes, format_seconds, plural

MOST_ROWS = 5
"""Changes in the table."""


def moves_view(plan: Plan, found: MovesFound, source: str) -> View:
    """Return the changes that help most, how to make the best, and why the plan did not take it.

    Args:
        plan: that may be changed.
        found: its changes.
        source: the plan's file, for the command.
    """
    view: list[Table | str] = []
    if found.best is None:
        view += _no_gain_lines(plan, found)
    else:
        command = f"pipeplan explain {shlex.quote(source)} --apply"
        view += [_moves_table(found), f'make it with: {command} "{found.best.move}" -o new.json']
        view.append(f"why the plan did not take it: {_why_not_taken(plan)}")
    if found.fits and found.overflowing:
        view.append(_overflow_line(found.overflowing[0]))
    if found.no_faster:
        view.append(f"{plural(found.no_faster, 'other change')} tried, and no faster")
    if found.left_out:
        view.append(f"{plural(found.left_out, 'other change')} skipped to save time")
    return view


def _moves_table(found: MovesFound) -> Table:
    what = "of the plan" if found.fits else "that make the plan fit"
    return Table.of(
        f"Single changes {what}, compared with {format_seconds(found.plan_s)}",
        ("change",),
        ("iteration", "vs now"),
        (
            (str(row.move), format_seconds(row.iteration_time_s), signed_share(-row.gain))
            for row in found.helpful[:MOST_ROWS]
        ),
    )


def _why_not_taken(plan: Plan) -> str:
    provenance, gap = plan.provenance, plan.predicted.gap
    if provenance.limit == "none":
        return (
            f"it was not searched for ({provenance.solver}); `pipeplan plan --warm-start` searches "
            "for a better one from here"
        )
    left = "without a bound" if gap is None else f"at a gap of {gap:.2%}"
    return (
        f"its search ({provenance.solver}, limit {provenance.limit}) ended {left} before it tried "
        "this; a longer one may find it, and more"
    )


def _no_gain_lines(plan: Plan, found: MovesFound) -> list[str]:
    lines = []
    if not found.fits:
        lines.append("no single change that was tried makes the plan fit")
    elif found.fitting:
        best = found.fitting[0]
        slower = signed_share(-best.gain) if abs(best.gain) >= LEAST_GAIN else "as long"
        lines.append(
            f"no single change that was tried helps: with the best, {best.move}, it takes {slower}"
        )
    else:
        lines.append("no single change that was tried fits in memory")
    gap = plan.predicted.gap
    if gap is not None:
        covers = plan.provenance.bound_covers
        lines.append(f"at most {gap / (1 + gap):.2%} can be saved at all, by {covers}")
    return lines


def _overflow_line(row: TimedMove) -> str:
    device, lacks_bytes = max(row.lacks_bytes.items(), key=lambda item: item[1])
    return (
        f"faster, but beyond memory in the orders tried: {row.move} ({signed_share(-row.gain)}): "
        f"{device} lacks {format_bytes(lacks_bytes)}"
    )


def moves_data(found: MovesFound) -> dict[str, Any]:
    """Return all changes as plain data."""
    return {
        "plan_s": found.plan_s,
        "no_faster": found.no_faster,
        "left_out": found.left_out,
        "moves": [
            {
                "move": str(row.move),
                "iteration_time_s": row.iteration_time_s,
                "gain": row.gain,
                "lacks_bytes": dict(row.lacks_bytes),
            }
            for row in (*found.fitting, *found.overflowing)
        ],
    }
