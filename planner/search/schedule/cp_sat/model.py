"""The microbatch schedule as a CP-SAT model: intervals, transfers, memory and the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ortools.sat.python import cp_model

from planner.plan.operations import Operation
from planner.search.schedule.assignment import Assignment
from planner.search.schedule.cp_sat.memory import Memory
from planner.search.schedule.cp_sat.operations import (
    Operations,
    Rows,
    Transfers,
    is_one_order,
    keep_order,
    rows_of,
)
from planner.search.schedule.measure import Measure, measure_bound_s, measured_s
from planner.search.schedule.ticks import TickPipeline
from planner.simulation.timeline import OperationEvent, Timeline
from planner.space import Backward


def minimise(operations: Operations, rows: Rows, measure: Measure) -> cp_model.IntVar:
    """Add the objective.

    Returns:
        Its variable, in ticks.
    """
    pipeline, model = operations.pipeline, operations.model
    split = operations.gradient == "I"
    least = pipeline.least_ticks(measure_bound_s(pipeline.real, measure, split=split))
    # In ticks, which are rounded down, a schedule may end before what is proved in seconds.
    total = model.new_int_var(least, max(least, operations.horizon), measure)
    if measure == "makespan":
        _measure_makespan(operations, total)
    else:
        _measure_spans(operations, rows, total)
    model.minimize(total)
    return total


def _measure_makespan(operations: Operations, total: cp_model.IntVar) -> None:
    pipeline, model = operations.pipeline, operations.model
    tails = {
        (index, device): pipeline.tail_s(index, device)
        for index, stage in enumerate(pipeline.stages)
        for device in stage.spec.devices
    }
    for stage, microbatch in sorted(operations.owner):
        end = operations.end[Operation(stage, operations.last, microbatch)]
        devices = operations.candidates(stage, microbatch)
        model.add(total >= end + min(tails[stage, device] for device in devices))
    if operations.free:
        return
    for number, placed in enumerate(pipeline.stages):
        # A reduction waits for every replica: its length counts from the last of them.
        least = min(tails[number, device] for device in placed.spec.devices)
        for device in placed.spec.devices:
            _bound_by_load(operations, total, number, device, least)


def _bound_by_load(
    operations: Operations, total: cp_model.IntVar, stage: int, device: str, tail: int
) -> None:
    """Add a redundant bound: a device's head, its work and its tail."""
    mine = [m for (s, m), d in operations.owner.items() if s == stage and d == device]
    first, second = (
        operations.least_ticks(stage, kind, device) for kind in ("F", operations.gradient)
    )
    weight = operations.least_ticks(stage, "W", device) if operations.last == "W" else 0
    head, back = _shortest_way(operations, stage)
    work = len(mine) * (first + second)
    operations.model.add(total >= head + work + len(mine) * weight + tail)
    operations.model.add(total >= head + work + back)


def _shortest_way(operations: Operations, stage: int) -> tuple[int, int]:
    """Return least ticks from the iteration's start to a stage, and back to the first."""
    head = back = 0
    pipeline = operations.pipeline
    for before in range(stage):
        devices = pipeline.stages[before].spec.devices
        head += min(operations.least_ticks(before, "F", d) for d in devices)
        back += min(operations.least_ticks(before, operations.gradient, d) for d in devices)
    return head, back


def _measure_spans(operations: Operations, rows: Rows, total: cp_model.IntVar) -> None:
    start, end = operations.start, operations.end
    for (stage, kind, device), row in rows.items():
        if kind == operations.last:
            first = rows[stage, "F", device][0]
            operations.model.add(total + start[first] >= end[row[-1]])


def with_split_backwards(replay: Timeline) -> Timeline:
    """Split every whole backward, with a weight gradient of no length at its end."""
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
    """Return stage and microbatch of each whole backward."""
    operations = (event.operation for event in replay.operations)
    return {(op.stage, op.microbatch) for op in operations if op.kind == "B"}


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


class ScheduleModel:
    """Start times of all operations and transfers, in ticks.

    The model and its variables are public: add constraints to ``model`` before solving.

    Args:
        pipeline: stages in ticks.
        replay: a feasible schedule of the pipeline in ticks; hint and horizon.
        owner: the device of each (stage, microbatch). Where ``free`` is set it is only a hint
            and the model chooses.
        free: let CP-SAT choose the replica of each microbatch.
        backward: kinds of backward. Of ``any``, input and weight gradients run apart, or as a whole
            backward where that takes less time and the model chooses so. If not given, ``any`` or
            ``whole`` as in the replay.
        measure: what is minimised.
        kept_bytes: by device, room that is kept for tensors on their way; the model leaves these
            out. With any the bound holds only for schedules that keep it free.
        shares: bytes of memory for the stashes of each (stage, device), if it is divided among the
            stages of a device; the replay keeps to them. The bound holds only for such schedules.

    Attributes:
        model: the CP-SAT model.
        operations: their start and end, and on which replica each runs.
        transfers: when those that hold links set off.
        objective: the measure, in ticks.
        is_exact: whether a bound of this model holds for every schedule of the stages with
            backwards split as here. It does if no stage is replicated and the replay runs every
            kind in one order (equal microbatches may be renumbered, so that loses nothing) or if
            replicas are chosen freely; and if memory is not divided. Whole backwards among split
            ones free their memory in turn with these, which a schedule need not.
    """

    def __init__(
        self,
        pipeline: TickPipeline,
        replay: Timeline,
        owner: Assignment,
        *,
        free: bool,
        backward: Backward | None = None,
        measure: Measure = "makespan",
        kept_bytes: Mapping[str, int] | None = None,
        shares: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        self.model = cp_model.CpModel()
        if backward is None:
            splits = any(event.operation.kind == "W" for event in replay.operations)
            backward = "any" if splits else "whole"
        split, whole = backward != "whole", whole_backwards(replay)
        replay = with_split_backwards(replay) if split else replay
        rows = rows_of(replay)
        self.operations = Operations(
            self.model,
            pipeline,
            owner,
            _horizon(pipeline, replay, measure),
            free=free,
            backward=backward,
        )
        keep_order(self.operations, rows)
        self.transfers = Transfers(self.operations)
        memory = Memory(self.operations, rows, kept_bytes, shares)
        self.objective = minimise(self.operations, rows, measure)
        add_hint(self.operations, self.transfers, memory, replay)
        for key, literal in self.operations.is_whole.items():
            self.model.add_hint(literal, key in whole)
        single = all(len(stage.spec.devices) == 1 for stage in pipeline.stages)
        restricted = shares is not None or (backward == "any" and pipeline.has_quicker_wholes)
        self.is_exact = not restricted and (free or (single and is_one_order(rows)))

    def orders(self, solver: cp_model.CpSolver) -> dict[str, list[Operation]]:
        """Return the order of every device in the solver's solution."""
        return self.operations.orders(solver)


def _horizon(pipeline: TickPipeline, replay: Timeline, measure: Measure) -> int:
    """Return the end of the replay and the longest tail; twice its span where that counts.

    A schedule of a smaller longest span T may end later than the replay, but not after 2T: every
    stage starts before the first stage's last gradient ends, and that is at T.
    """
    tails = [
        pipeline.tail_s(index, device)
        for index, stage in enumerate(pipeline.stages)
        for device in stage.spec.devices
    ]
    end = round(max(event.end_s for event in replay.operations)) + max(tails)
    if measure == "makespan":
        return end
    return max(end, 2 * math.ceil(measured_s(replay, measure)))
