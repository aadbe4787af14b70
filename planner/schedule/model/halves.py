"""A replay with some backwards whole, as the model of split ones sees it."""

from __future__ import annotations

from dataclasses import replace

from planner.simulator import OperationEvent, Timeline


def in_halves(replay: Timeline) -> Timeline:
    """Every whole backward as an input gradient, and a weight gradient of no length at its end."""
    events: list[OperationEvent] = []
    for event in replay.operations:
        if event.operation.kind != "B":
            events.append(event)
            continue
        gradient, weight = (event.operation._replace(kind=kind) for kind in ("I", "W"))
        events.append(replace(event, operation=gradient))
        events.append(replace(event, operation=weight, start_s=event.end_s))
    return replace(replay, operations=tuple(sorted(events, key=lambda event: event.start_s)))


def whole_backwards(replay: Timeline) -> set[tuple[int, int]]:
    """Stage and microbatch of each."""
    operations = (event.operation for event in replay.operations)
    return {(op.stage, op.microbatch) for op in operations if op.kind == "B"}
