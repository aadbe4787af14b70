"""Offloaded stashes: copies to the host and back, where orders are given.

A stash leaves when its forward ends, and comes back when the operation before its backward starts.
On the host link of a device one stash is on its way at a time. The stash of a microbatch whose
backward directly follows its forward stays, and so does that of one whose backward is split.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.operations import B, F
from planner.program.lower.room import (
    OPERATION_TASK,
    ROOM,
    WAY_USES,
    add_line,
    edge,
    new_task,
    new_way,
)
from planner.program.program import EFFECTS, FLOW, PROGRAM, TASKS
from planner.program.schedule import FIXED, ORDER_CODES, ORDER_START, OWNER, SCHEDULE
from planner.program.stage_rows import REPLICA, ROWS, STAGE


@compiled
def offloads(rows: Any) -> bool:
    """Return whether some stage offloads anything."""
    for stage in range(header(rows, ROWS).stages):
        if row(rows, STAGE, stage).offload_bytes > 0:
            return True
    return False


@compiled
def fill_copies(rows: Any, schedule: Any, program: Any, work: Any, n: int) -> int:
    """Fill in the copies of all devices, from task n on; return what follows."""
    if header(schedule, SCHEDULE).rule != FIXED or not offloads(rows):
        return n
    h, state = header(rows, ROWS), header(work, ROOM)
    state.copy_ways = header(program, PROGRAM).ways
    for replica in range(h.replicas):
        _add_way(rows, program, work, replica)
    start, codes = items(schedule, ORDER_START), items(schedule, ORDER_CODES)
    count = h.microbatches
    for device in range(h.devices):
        for place in range(start[device] + 1, start[device + 1]):
            stage, kind = codes[place] // (4 * count), codes[place] // count % 4
            own_forward = (stage * 4 + F) * count + codes[place] % count
            if kind != B or row(rows, STAGE, stage).offload_bytes == 0:
                continue
            if codes[place - 1] != own_forward:
                _copy(rows, schedule, program, work, codes[place], codes[place - 1], n)
                n += 2
    return n


@compiled
def _add_way(rows: Any, program: Any, work: Any, replica: int) -> None:
    """Add the way of a replica's stashes, and the effects of a copy out and a copy back."""
    numbers, found = header(program, PROGRAM), row(rows, REPLICA, replica)
    way = new_way(program, work, 0.0, np.inf)
    row(work, WAY_USES, way).seconds = found.copy_s
    add_line(program, work, way, header(work, ROOM).copy_lines + found.device)
    bytes_ = row(rows, STAGE, found.stage).offload_bytes
    for back in range(2):
        effect = row(program, EFFECTS, numbers.effects + 2 * replica + back)
        effect.start_device = effect.end_device = found.device
        effect.start_bytes = bytes_ if back else 0
        effect.end_bytes = 0 if back else -bytes_


@compiled
def _copy(
    rows: Any, schedule: Any, program: Any, work: Any, backward: int, before: int, n: int
) -> None:
    """Copy the stash of a backward out, which is task n, and back during the operation before."""
    h, operation_task = header(rows, ROWS), items(work, OPERATION_TASK)
    stage, m = backward // (4 * h.microbatches), backward % h.microbatches
    replica = items(schedule, OWNER)[stage * h.microbatches + m]
    way = header(work, ROOM).copy_ways + replica
    row(work, WAY_USES, way).flows += 2
    for back in range(2):
        new_task(program, n + back, FLOW, way)
        task = row(program, TASKS, n + back)
        task.seconds, task.replica = row(work, WAY_USES, way).seconds, replica
        task.stage, task.microbatch, task.kind = stage, m, B if back else F
        task.effect = header(program, PROGRAM).effects + 2 * replica + back
    forward = operation_task[(stage * 4 + F) * h.microbatches + m]
    edge(work, forward if forward >= 0 else n, n)
    row(program, TASKS, operation_task[before]).at_start = n + 1
    row(program, TASKS, n + 1).waits = 1
    edge(work, n + 1, operation_task[backward])
