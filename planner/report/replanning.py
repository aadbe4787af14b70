"""A plan for a changed cluster: its time, the alternatives, and the state to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from planner.plan.moves import CHECKPOINT, Moves
from planner.plan.operations import compress_devices
from planner.report.tables import Table, View
from planner.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from planner.replanning.choice import Alternative
    from planner.replanning.replan import Replanned

MOST_MOVES = 20
"""Rows of the table of moves; the file of moves has all."""


def _alternatives_table(found: Replanned) -> Table:
    """Return the chosen plan, the fastest and the one that moves least; equal ones in one row."""
    fastest_s = min(row.iteration_time_s for row in found.alternatives)
    return Table.of(
        "Plans found",
        ["plan"],
        ["iteration", "vs fastest", "to move", "stages", "devices"],
        (
            (
                ", ".join(roles),
                format_seconds(row.iteration_time_s),
                f"{row.iteration_time_s / fastest_s - 1:+.1%}",
                format_bytes(row.moved_bytes),
                *map(str, _size(found, row)),
            )
            for roles, row in _distinct(found.alternatives)
        ),
    )


def _size(found: Replanned, row: Alternative) -> tuple[int, int]:
    """Return the numbers of stages and devices of an alternative."""
    pipeline = row.timeline.pipeline
    return len(pipeline.stages), found.plan.degree * len(pipeline.devices)


def _distinct(rows: Sequence[Alternative]) -> list[tuple[list[str], Alternative]]:
    found: dict[tuple[float, int], tuple[list[str], Alternative]] = {}
    for row in rows:
        key = row.iteration_time_s, row.moved_bytes
        found.setdefault(key, ([], row))[0].append(row.role)
    return list(found.values())


def _moves_table(moves: Moves) -> Table:
    """Return a table of moves, the largest first."""
    ranked = sorted(moves.moves, key=lambda move: -move.bytes)
    rows = (
        (
            *(move.target, move.source or CHECKPOINT, compress_devices(move.layers)),
            format_bytes(move.bytes),
            "" if move.seconds is None else format_seconds(move.seconds),
        )
        for move in ranked[:MOST_MOVES]
    )
    return Table.of("State to move", ["to", "from", "layers"], ["bytes", "alone"], rows)


def replanned_view(found: Replanned) -> View:
    """Return the alternatives, what moves, and lines on both."""
    moves = [_moves_table(found.moves)] if found.moves.moves else []
    return [_alternatives_table(found), *moves, *_lines(found)]


def _lines(found: Replanned) -> Iterator[str]:
    plan, moves = found.plan, found.moves
    hidden = len(moves.moves) - MOST_MOVES
    if hidden > 0:
        yield f"… and {plural(hidden, 'smaller move')}; --moves FILE writes all"
    now_s, old_s = plan.predicted.iteration_time_s, found.old_iteration_time_s
    yield (
        f"iteration time {format_seconds(now_s)} ({now_s / old_s - 1:+.1%} compared with the old "
        f"plan's {format_seconds(old_s)}); same samples per iteration, model and optimizer"
        if old_s
        else f"iteration time {format_seconds(now_s)}"
    )
    yield _bound(found)
    yield _moved(moves)
    used = set(plan.rank_devices)
    idle = [name for name in plan.cluster.device_names if name not in used]
    if idle:
        yield f"left unused: {compress_devices(idle)}"


def _bound(found: Replanned) -> str:
    predicted = found.plan.predicted
    ended = f"search ended after {found.search_s:.1f} s: {found.ended}"
    if predicted.gap is None:
        return f"no lower bound proved within the time limit; {ended}"
    return (
        f"lower bound for this cluster {format_seconds(predicted.lower_bound_s)} (gap "
        f"{predicted.gap:.1%}); {ended}"
    )


def _moved(moves: Moves) -> str:
    if not moves.moves:
        return "nothing to move: every device already holds its state"
    between, read = moves.bytes_between_devices, moves.bytes_from_checkpoint
    parts = []
    if between:
        parts.append(
            f"{format_bytes(between)} from other devices ({format_seconds(moves.seconds)} over the "
            f"links)"
        )
    if read:
        parts.append(
            f"{format_bytes(read)} from the checkpoint only, since no remaining device holds it"
        )
    return f"to move: {format_bytes(moves.bytes)}; {', '.join(parts)}"


def replanned_data(found: Replanned) -> dict[str, Any]:
    """Return plain data for JSON."""
    plan = found.plan
    return {
        **plan.predicted.model_dump(mode="json"),
        "old_iteration_time_s": found.old_iteration_time_s,
        "ranks": list(plan.ranks),
        "slack": found.slack,
        "ended": found.ended,
        "search_s": found.search_s,
        "alternatives": [
            {
                "role": row.role,
                "iteration_time_s": row.iteration_time_s,
                "moved_bytes": row.moved_bytes,
                **dict(zip(("stages", "devices"), _size(found, row), strict=True)),
            }
            for row in found.alternatives
        ],
        "moves": found.moves.model_dump(mode="json"),
        "notes": list(found.notes),
    }
