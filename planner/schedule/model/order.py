"""Equal microbatches are interchangeable: each kind of operation runs in one order."""

from __future__ import annotations

from itertools import pairwise

from planner.artifacts.operations import Operation
from planner.schedule.model.operations import Operations
from planner.simulator import Timeline

Rows = dict[tuple[int, str, str], list[Operation]]


def rows_of(replay: Timeline) -> Rows:
    """Operations of each (stage, kind, device) in the order in which a replay ran them."""
    rows: Rows = {}
    for event in sorted(replay.operations, key=lambda event: event.start_s):
        key = (event.operation.stage, event.operation.kind, event.device)
        rows.setdefault(key, []).append(event.operation)
    return rows


def is_one_order(rows: Rows) -> bool:
    """Whether all rows run the microbatches in the same order, as renumbering them allows."""
    return len({tuple(op.microbatch for op in row) for row in rows.values()}) == 1


def keep_order(operations: Operations, rows: Rows) -> None:
    """Run each kind of operation of a replica in the order of the rows.

    With free replicas only the order of the first stage's forwards may be fixed.
    """
    model, start = operations.model, operations.start
    if operations.free:
        for first, second in pairwise(range(operations.pipeline.microbatches)):
            model.add(start[Operation(0, "F", first)] <= start[Operation(0, "F", second)])
        return
    for row in rows.values():
        for before, after in pairwise(row):
            model.add(start[after] >= operations.end[before])
