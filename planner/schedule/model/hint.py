"""A complete hint from a replayed schedule: CP-SAT often drops an incomplete one."""

from __future__ import annotations

from planner.artifacts.operations import Operation
from planner.schedule.model.memory import Memory
from planner.schedule.model.operations import Operations
from planner.schedule.model.transfers import Transfers
from planner.simulator import Timeline


def add_hint(
    operations: Operations, transfers: Transfers, memory: Memory, replay: Timeline
) -> None:
    """Tell the solver when everything happened in a replay of the same pipeline in ticks."""
    model = operations.model
    events = {event.operation: event for event in replay.operations}
    for operation, start in operations.start.items():
        model.add_hint(start, round(events[operation].start_s))
    _hint_transfers(transfers, replay)
    for (gradient, forward), literal in memory.ended_before.items():
        ended = events[gradient].end_s <= events[forward].start_s
        model.add_hint(literal, ended)
    if operations.free:
        for (stage, microbatch, device), runs in operations.runs_on.items():
            chosen = events[Operation(stage, "F", microbatch)].device == device
            if len(operations.candidates(stage, microbatch)) > 1:
                model.add_hint(runs, chosen)  # type: ignore[arg-type]


def _hint_transfers(transfers: Transfers, replay: Timeline) -> None:
    replayed = {
        (event.operation, event.source, event.target): round(event.start_s)
        for event in replay.transfers
    }
    for (producer, source, target), variable in transfers.start.items():
        # A replay calls all gradients on their way B.
        sent = producer if producer.kind == "F" else producer._replace(kind="B")
        transfers.model.add_hint(variable, replayed.get((sent, source, target), 0))
