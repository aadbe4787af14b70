"""The order of one of several equal pipelines, and its copies, compiled."""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.schedule import FIXED, ORDER_CODES, ORDER_START, OWNER, SCHEDULE
from planner.program.stage_rows import REPLICA, ROWS, STAGE
from planner.search.walk.memory import FIRST_STAGE, ORDER, STARTS


@compiled
def keep_order(w: Any, rows: Any, schedule: Any) -> Any:
    """Keep the order of one of several pipelines in the memory of the walk."""
    devices, starts = header(rows, ROWS).devices, items(w, STARTS)
    for place in range(devices + 1):
        starts[place] = items(schedule, ORDER_START)[place]
    for i in range(starts[devices]):
        items(w, ORDER)[i] = items(schedule, ORDER_CODES)[i]
    for r in range(header(rows, ROWS).replicas - 1, -1, -1):
        replica = row(rows, REPLICA, r)
        items(w, FIRST_STAGE)[replica.device] = replica.stage
    return devices


@compiled
def spread_order(w: Any, rows: Any, schedule: Any, devices: Any, copies: Any) -> Any:
    """Give every pipeline the order that was kept of one of them.

    Args:
        w: pointer to the memory of the walk.
        rows: pointer to the rows of all pipelines.
        schedule: pointer to the schedule of all; owners and orders are written.
        devices: of one pipeline.
        copies: number of pipelines.
    """
    numbers, codes = header(rows, ROWS), items(schedule, ORDER_CODES)
    start, order, starts = items(schedule, ORDER_START), items(w, ORDER), items(w, STARTS)
    total = numbers.microbatches
    share, at = total // copies, 0
    for s in range(numbers.stages):
        for m in range(total):
            items(schedule, OWNER)[s * total + m] = row(rows, STAGE, s).first + m % copies
    for place in range(numbers.devices):
        start[place] = at
        for q in range(devices):
            first = row(rows, STAGE, items(w, FIRST_STAGE)[q]).first
            for copy in range(copies):
                if row(rows, REPLICA, first + copy).device != place:
                    continue
                for i in range(starts[q], starts[q + 1]):
                    operation, m = order[i] // share, order[i] % share
                    codes[at] = operation * total + m * copies + copy
                    at += 1
    start[numbers.devices] = at
    header(schedule, SCHEDULE).rule = FIXED
