"""Reductions of gradients, optimizer steps, and all-gathers of parameters after these.

By the rules ``bucket`` and ``stage`` a reduction waits for all replicas that make its gradients:
each has made them some time before the end of its last backward. By ``device`` and ``flush`` it
waits for all that its devices, or all devices, run and send. A device takes part in one at a time.
"""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.operations import B, F, W
from planner.program.lower.room import (
    MESSAGE_TASK,
    OPERATION_TASK,
    ROOM,
    WAY_USES,
    add_device,
    add_line,
    edge,
    new_task,
    new_way,
)
from planner.program.program import (
    AHEAD,
    DEVICES,
    JOIN,
    LATE_FLOW,
    MAKERS,
    PROGRAM,
    REPLICAS,
    STEP,
    TASKS,
)
from planner.program.schedule import OWNER
from planner.program.stage_rows import (
    AHEAD_S,
    DEVICE,
    MAKER,
    REDUCTION,
    REDUCTION_DEVICE,
    REPLICA,
    ROWS,
)

_BUCKET, _STAGE, _DEVICE, _FLUSH = range(4)


@compiled
def fill_joins(rows: Any, schedule: Any, program: Any, work: Any, n: int) -> int:
    """Fill in the ends of all that a device runs and sends, from task n on; return what follows.

    They are there where reductions wait for them: one of each device, or one of all.
    """
    h, state = header(rows, ROWS), header(work, ROOM)
    state.first_join = n
    if h.reductions == 0 or h.reduction_rule == _BUCKET or h.reduction_rule == _STAGE:
        return n
    count = h.devices if h.reduction_rule == _DEVICE else 1
    for join in range(count):
        new_task(program, n + join, JOIN, -1)
    owner = items(schedule, OWNER)
    for stage in range(h.stages):
        for m in range(h.microbatches):
            replica = owner[stage * h.microbatches + m]
            if replica >= 0:
                place = row(rows, REPLICA, replica).device if h.reduction_rule == _DEVICE else 0
                _join_work(rows, schedule, work, stage, m, n + place)
    return n + count


@compiled
def _join_work(rows: Any, schedule: Any, work: Any, stage: int, m: int, join: int) -> None:
    """Have a join wait for a stage's microbatch, and for its messages where sends block."""
    h, owner = header(rows, ROWS), items(schedule, OWNER)
    operation_task, message_task = items(work, OPERATION_TASK), items(work, MESSAGE_TASK)
    count = h.microbatches
    forward = operation_task[(stage * 4 + F) * count + m]
    backward = operation_task[(stage * 4 + B) * count + m]
    if backward < 0:
        backward = operation_task[(stage * 4 + W) * count + m]
    edge(work, forward if forward >= 0 else join, join)
    edge(work, backward if backward >= 0 else join, join)
    if h.send_blocks and stage < h.stages - 1 and owner[(stage + 1) * count + m] >= 0:
        edge(work, message_task[((stage + 1) * 2 + F) * count + m], join)
    if h.send_blocks and stage > 0 and owner[(stage - 1) * count + m] >= 0:
        edge(work, message_task[((stage - 1) * 2 + B) * count + m], join)


@compiled
def fill_reductions(rows: Any, program: Any, work: Any, n: int) -> int:
    """Fill in reductions, steps and gathers, from task n on; return how many tasks there are."""
    h, numbers, state = header(rows, ROWS), header(program, PROGRAM), header(work, ROOM)
    numbers.first_late = n
    state.reduction_ways = numbers.ways
    for number in range(h.reductions):
        _fill_reduction(rows, program, work, number, n + number)
    _fill_makers(rows, program)
    steps = n + h.reductions
    for device in range(h.devices):
        new_task(program, steps + device, STEP, device)
        row(program, TASKS, steps + device).seconds = row(rows, DEVICE, device).optimizer_s
        row(program, DEVICES, device).step = steps + device
    return _fill_gathers(rows, program, work, n, steps)


@compiled
def _fill_reduction(rows: Any, program: Any, work: Any, number: int, n: int) -> None:
    found, members = row(rows, REDUCTION, number), items(rows, REDUCTION_DEVICE)
    new_task(program, n, LATE_FLOW, _new_way(rows, program, work, number, found.latency_s))
    row(program, TASKS, n).seconds = found.seconds
    h, state = header(rows, ROWS), header(work, ROOM)
    for place in range(found.first_device, found.last_device):
        if h.reduction_rule == _DEVICE:
            edge(work, state.first_join + members[place], n)
    if h.reduction_rule == _FLUSH:
        edge(work, state.first_join, n)


@compiled
def _new_way(rows: Any, program: Any, work: Any, number: int, latency_s: float) -> int:
    """Add the way of a reduction, or of its all-gather; return its number."""
    found, members = row(rows, REDUCTION, number), items(rows, REDUCTION_DEVICE)
    way = new_way(program, work, latency_s, found.gb_per_s)
    use = row(work, WAY_USES, way)
    use.flows, use.reduction = 1, number
    for place in range(found.first_device, found.last_device):
        device = members[place]
        add_line(program, work, way, device)
        if row(program, DEVICES, device).is_slowed:
            add_device(program, work, way, device)
    return int(way)


@compiled
def _fill_makers(rows: Any, program: Any) -> None:
    """List, by replica, the reductions of which it makes gradients, and how early it has them."""
    h, numbers, maker = header(rows, ROWS), header(program, PROGRAM), items(rows, MAKER)
    numbers.makers = 0
    for n in range(h.replicas):
        row(program, REPLICAS, n).maker = row(program, REPLICAS, n).maker_end = 0
    if h.reduction_rule > _STAGE:
        return
    for place in range(h.makers):
        replica = row(program, REPLICAS, maker[place])
        replica.maker_end += replica.microbatches > 0
    for n in range(h.replicas):
        replica = row(program, REPLICAS, n)
        replica.maker = numbers.makers
        numbers.makers += replica.maker_end
        replica.maker_end = replica.maker
    makers, ahead, ahead_s = items(program, MAKERS), items(program, AHEAD), items(rows, AHEAD_S)
    for number in range(h.reductions):
        found, n = row(rows, REDUCTION, number), numbers.first_late + number
        for place in range(found.first_maker, found.last_maker):
            replica = row(program, REPLICAS, maker[place])
            if replica.microbatches == 0:
                continue
            at = replica.maker_end
            makers[at] = n
            for length in range(h.classes):
                for kind in range(2):
                    left_s = ahead_s[(length * h.makers + place) * 2 + kind]
                    ahead[(2 * length + kind) * numbers.makers + at] = left_s
            replica.maker_end += 1
            row(program, TASKS, n).waits += 1


@compiled
def _fill_gathers(rows: Any, program: Any, work: Any, first: int, steps: int) -> int:
    """Have devices step after their reductions, and gather parameters after that."""
    h, members = header(rows, ROWS), items(rows, REDUCTION_DEVICE)
    n = steps + h.devices
    for number in range(h.reductions):
        found = row(rows, REDUCTION, number)
        if found.gathers:
            way = _new_way(rows, program, work, number, found.gather_latency_s)
            new_task(program, n, LATE_FLOW, way)
            row(program, TASKS, n).seconds = found.gather_s
        for place in range(found.first_device, found.last_device):
            edge(work, first + number, steps + members[place])
            if found.gathers:
                edge(work, steps + members[place], n)
        n += found.gathers
    return int(n)


@compiled
def wait_for_sends(rows: Any, schedule: Any, program: Any, work: Any) -> None:
    """Have devices step after their messages have arrived, where sends block."""
    h, owner = header(rows, ROWS), items(schedule, OWNER)
    message_task, count = items(work, MESSAGE_TASK), h.microbatches
    for stage in range(h.stages if h.send_blocks else 0):
        for kind in range(2):
            source = stage - 1 if kind == F else stage + 1
            for m in range(count):
                n = message_task[(stage * 2 + kind) * count + m]
                if n >= 0:
                    device = row(rows, REPLICA, owner[source * count + m]).device
                    edge(work, n, row(program, DEVICES, device).step)
