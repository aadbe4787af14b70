"""What the schedule's CP-SAT model minimises, and what bounds it."""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.artifacts.operations import Operation
from planner.schedule.measure import Measure, measure_bound_s
from planner.schedule.model.operations import Operations
from planner.schedule.model.order import Rows


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
    """Redundant: what comes before a device's first operation, its work, what comes after."""
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
    """Least ticks from the iteration's start to a stage, and from it back to the first."""
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
