"""The time of given orders as a longest path, compiled: a fraction of the time of a replay.

An operation starts when its device is free and what it needs has arrived; messages of a line follow
each other. Links that flows share, reductions, slowed devices, copies to hosts and replicas that
start together are left out: they only delay. So the path is a lower bound on the replay's time, and
equal to it where there are none. What devices hold of stashes is summed along their orders; tensors
on their way are left out too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, items, pointer_at, row
from planner.program.lower.operations import B, F, I
from planner.program.lower.room import MESSAGE_TASK, OPERATION_TASK, ROOM
from planner.program.program import DEVICES, FLOW, ORDER, PROGRAM, TASKS, WAY_LINES, WAYS
from planner.program.stage_rows import DEVICE, REPLICA, ROWS, STAGE
from planner.search.orders.memory import ARRIVAL_S, LANES, LINE_FREE_S, ORDERS, STACK, STEPS

EARLINESS = 0.02
"""Weight of the mean time at which devices are done, which tells orders of equal length apart."""
PATHS_PER_REPLAY = 8
"""A step of a path counts as work as this part of a task of a replay."""


@compiled
def energy_of_path_s(o: Any, most_s: float) -> float:
    """Return the path's length and a little of the mean time at which devices are done.

    Infinite if it takes longer than ``most_s``, does not fit memory or deadlocks. ``path_s`` and
    ``is_roomy`` are written.

    Args:
        o: pointer to the memory of a search over orders, whose STEPS are those of the program.
        most_s: seconds.
    """
    h = header(o, ORDERS)
    program = pointer_at(h.program, PROGRAM)
    order, arrival_s, line_free_s = (
        items(program, ORDER),
        items(o, ARRIVAL_S),
        items(o, LINE_FREE_S),
    )
    stack, devices = items(o, STACK), header(program, PROGRAM).devices
    _begin(o, program)
    limit_s, top = most_s - EARLINESS * h.mean_load_s, devices
    left = total = row(program, DEVICES, devices - 1).order_end
    while top > 0:
        top -= 1
        lane = row(o, LANES, stack[top])
        lane.is_queued = 0
        at, end, free_s, idle_s, held = lane.at, lane.end, lane.free_s, lane.idle_s, lane.held_bytes
        room, sure = lane.capacity_bytes, lane.capacity_bytes - lane.way_bytes
        most_idle_s = limit_s - lane.load_s - lane.tail_s
        while at < end:
            n = order[at]
            step = row(o, STEPS, n)
            if step.source >= 0:
                come_s = arrival_s[step.source]
                if come_s < 0:
                    break
                if come_s > free_s:
                    idle_s += come_s - free_s
                    free_s = come_s
                    if idle_s > most_idle_s:
                        return np.inf
            held += step.start_bytes
            if held > sure and step.seconds > 0:
                if held > room:
                    return np.inf
                h.is_roomy = 0
            held += step.end_bytes
            free_s += step.seconds
            come_s = free_s
            if step.line >= 0:
                come_s = max(come_s, line_free_s[step.line]) + step.message_s
                line_free_s[step.line] = come_s
            else:
                come_s += step.message_s
            arrival_s[n] = come_s
            at += 1
            left -= 1
            if step.target >= 0 and not row(o, LANES, step.target).is_queued:
                row(o, LANES, step.target).is_queued = 1
                stack[top] = step.target
                top += 1
        lane.at, lane.free_s, lane.idle_s, lane.held_bytes = at, free_s, idle_s, held
    h.tasks += total // PATHS_PER_REPLAY
    if left > 0:
        return np.inf
    path_s, total_s = 0.0, 0.0
    for d in range(devices):
        lane = row(o, LANES, d)
        path_s = max(path_s, lane.free_s + lane.tail_s)
        total_s += lane.free_s
    h.path_s = path_s
    return path_s + EARLINESS * total_s / devices


@compiled
def _begin(o: Any, program: Any) -> None:
    """Set all to the begin of an iteration, where every device may go on."""
    h, devices = header(o, ORDERS), header(program, PROGRAM).devices
    arrival_s, line_free_s = items(o, ARRIVAL_S), items(o, LINE_FREE_S)
    for n in range(header(pointer_at(h.room, ROOM), ROOM).first_copy):
        arrival_s[n] = -1.0
    for line in range(header(program, PROGRAM).lines):
        line_free_s[line] = 0.0
    h.is_roomy = 1
    for d in range(devices):
        lane, device = row(o, LANES, d), row(program, DEVICES, d)
        lane.at, lane.end = device.order, device.order_end
        lane.free_s = lane.idle_s = 0.0
        lane.held_bytes, lane.is_queued = lane.static_bytes, 1
        items(o, STACK)[devices - 1 - d] = d


# --- what a path needs of a program ---------------------------------------------------------------


@compiled
def read_program(o: Any) -> None:
    """Fill in STEPS and LANES of the program, which was lowered from the rows in given orders."""
    h = header(o, ORDERS)
    program, rows = pointer_at(h.program, PROGRAM), pointer_at(h.rows, ROWS)
    room, numbers = pointer_at(h.room, ROOM), header(program, PROGRAM)
    has_copies = header(room, ROOM).first_exchange > header(room, ROOM).first_copy
    h.is_quick = h.blocks == 0
    is_plain = numbers.links == 0 and numbers.is_slowed == 0 and numbers.groups == 0
    is_plain = is_plain and not has_copies and header(rows, ROWS).reductions == 0
    h.is_exact = is_plain and not header(rows, ROWS).one_stream
    _read_devices(o, rows, program)
    _read_operations(o, rows, program, room)
    h.mean_load_s = 0.0
    for d in range(numbers.devices):
        lane, device = row(o, LANES, d), row(program, DEVICES, d)
        for i in range(device.order, device.order_end):
            step = row(o, STEPS, items(program, ORDER)[i])
            lane.load_s += step.seconds
            if has_copies:
                step.start_bytes = step.end_bytes = 0
        h.mean_load_s += lane.load_s / numbers.devices


@compiled
def _read_devices(o: Any, rows: Any, program: Any) -> None:
    total = header(rows, ROWS).microbatches
    for d in range(header(program, PROGRAM).devices):
        lane, device = row(o, LANES, d), row(program, DEVICES, d)
        lane.static_bytes, lane.capacity_bytes = device.static_bytes, device.capacity_bytes
        lane.load_s, lane.tail_s = 0.0, row(rows, DEVICE, d).optimizer_s
        lane.way_bytes = 0
    for r in range(header(rows, ROWS).replicas):
        replica = row(rows, REPLICA, r)
        stage, lane = row(rows, STAGE, replica.stage), row(o, LANES, replica.device)
        each = stage.input_bytes + stage.output_bytes
        each += stage.input_gradient_bytes + stage.output_gradient_bytes
        lane.way_bytes += total * each


@compiled
def _read_operations(o: Any, rows: Any, program: Any, room: Any) -> None:
    h, operations = header(rows, ROWS), items(room, OPERATION_TASK)
    for stage in range(h.stages):
        for kind in range(4):
            for m in range(h.microbatches):
                n = operations[(stage * 4 + kind) * h.microbatches + m]
                if n < 0:
                    continue
                step, task = row(o, STEPS, n), row(program, TASKS, n)
                step.seconds, step.device = task.seconds, task.resource
                step.source = step.target = step.line = -1
                step.message_s = 0.0
                _read_bytes(rows, task.replica, stage, kind, step)
    for stage in range(h.stages):
        for kind in (B, F, I):
            for m in range(h.microbatches):
                n = operations[(stage * 4 + kind) * h.microbatches + m]
                if n >= 0:
                    _read_input(o, rows, program, room, n, stage, kind, m)


@compiled
def _read_bytes(rows: Any, replica: int, number: int, kind: int, step: Any) -> None:
    """Fill in what an operation holds for certain."""
    stage, more = row(rows, STAGE, number), 0
    if kind == F:
        more = stage.output_bytes
        step.start_bytes, step.end_bytes = stage.stash_bytes + more, -more
        return
    if kind not in (B, I):
        step.start_bytes, step.end_bytes = 0, -stage.weight_stash_bytes
        return
    more = stage.input_gradient_bytes
    if number < header(rows, ROWS).stages - 1:
        more += stage.output_gradient_bytes
    kept = 0
    if kind == I:
        more += row(rows, REPLICA, replica).split_extra_bytes
        kept = stage.weight_stash_bytes
    step.start_bytes, step.end_bytes = more, kept - stage.stash_bytes - more


@compiled
def _read_input(
    o: Any, rows: Any, program: Any, room: Any, n: int, stage: int, kind: int, m: int
) -> None:
    """Fill in whose result an operation needs, and the message with it."""
    h, operations = header(rows, ROWS), items(room, OPERATION_TASK)
    before = stage - 1 if kind == F else stage + 1
    if before < 0 or before >= h.stages:
        return
    source = operations[(before * 4 + (F if kind == F else B)) * h.microbatches + m]
    if source < 0 and kind != F:
        source = operations[(before * 4 + I) * h.microbatches + m]
    if source < 0:
        return
    step, made = row(o, STEPS, n), row(o, STEPS, source)
    step.source = source
    if made.device != step.device:
        made.target = step.device
    message = items(room, MESSAGE_TASK)[(stage * 2 + (kind == F)) * h.microbatches + m]
    task = row(program, TASKS, message)
    if task.role != FLOW:
        return
    made.message_s = task.seconds
    way = row(program, WAYS, task.resource)
    if way.line_end > way.line:
        made.line = items(program, WAY_LINES)[way.line]
