"""Operations: what devices compute, in given orders or by a rule of list scheduling."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.lower.room import MESSAGE_TASK, OPERATION_TASK, edge, new_task
from planner.program.lower.wires import (
    COMPUTE_SLOWDOWN,
    HOST_OF,
    MESSAGE_SLOWDOWN,
    SLOWDOWN,
    WIRES,
)
from planner.program.program import (
    BY_PRIORITY,
    COMPUTE,
    DEVICE_REPLICAS,
    DEVICES,
    EFFECTS,
    HOSTS,
    IN_ORDER,
    ORDER,
    PROGRAM,
    REPLICAS,
    SLOWDOWNS,
    TASKS,
)
from planner.program.schedule import (
    BACKWARD_FIRST,
    DUE_S,
    FIXED,
    FORWARD_FIRST,
    IS_SPLIT,
    LIMIT,
    MOST_OWED,
    ORDER_CODES,
    ORDER_START,
    OWNER,
    PERIOD_S,
    RESERVE_BYTES,
    SCHEDULE,
)
from planner.program.stage_rows import DEVICE, LENGTH_OF, REPLICA, ROWS, SECONDS, STAGE

B, F, I, W = range(4)  # noqa: E741
TICK_S = 1e-9
"""Priorities of the rhythm are whole numbers of it."""


@compiled
def number_tasks(rows: Any, schedule: Any, work: Any) -> int:
    """Number operations, and each message after the operation that it goes to; return how many."""
    stages, count = header(rows, ROWS).stages, header(rows, ROWS).microbatches
    owner = items(schedule, OWNER)
    operation_task, message_task = items(work, OPERATION_TASK), items(work, MESSAGE_TASK)
    _mark_operations(rows, schedule, work)
    n = 0
    for stage in range(stages):
        for kind in range(4):
            source = stage - 1 if kind == F else stage + 1
            has_source = kind < 2 and 0 <= source < stages
            for m in range(count):
                code = (stage * 4 + kind) * count + m
                if operation_task[code] >= 0:
                    operation_task[code] = n
                    n += 1
                if kind > F:
                    continue
                message_task[(stage * 2 + kind) * count + m] = -1
                if has_source and owner[stage * count + m] >= 0 and owner[source * count + m] >= 0:
                    message_task[(stage * 2 + kind) * count + m] = n
                    n += 1
    return n


@compiled
def _mark_operations(rows: Any, schedule: Any, work: Any) -> None:
    """Set the places of all operations that run to 0, those of others to -1."""
    h = header(rows, ROWS)
    operation_task, codes = items(work, OPERATION_TASK), items(schedule, ORDER_CODES)
    count = h.microbatches
    if header(schedule, SCHEDULE).rule == FIXED:
        for code in range(4 * h.stages * count):
            operation_task[code] = -1
        for place in range(items(schedule, ORDER_START)[h.devices]):
            operation_task[codes[place]] = 0
        return
    owner = items(schedule, OWNER)
    for stage in range(h.stages):
        is_split = items(schedule, IS_SPLIT)[stage]
        for kind in range(4):
            runs = kind == F or (kind == B) != is_split
            for m in range(count):
                is_run = runs and owner[stage * count + m] >= 0
                operation_task[(stage * 4 + kind) * count + m] = 0 if is_run else -1


@compiled
def fill_operations(rows: Any, schedule: Any, program: Any, work: Any) -> None:
    """Fill in the tasks of operations, and what they need of each other on one device."""
    h, count = header(rows, ROWS), header(rows, ROWS).microbatches
    owner, length_of = items(schedule, OWNER), items(rows, LENGTH_OF)
    operation_task, rule = items(work, OPERATION_TASK), header(schedule, SCHEDULE).rule
    seconds = items(rows, SECONDS)
    for stage in range(h.stages):
        for kind in range(4):
            for m in range(count):
                n = operation_task[(stage * 4 + kind) * count + m]
                if n < 0:
                    continue
                replica, length = owner[stage * count + m], length_of[m]
                new_task(program, n, COMPUTE, row(rows, REPLICA, replica).device)
                task = row(program, TASKS, n)
                task.seconds = seconds[(length * h.replicas + replica) * 4 + kind]
                task.effect, task.replica = 4 * replica + kind, replica
                task.microbatch, task.stage, task.kind = m, stage, kind
                if kind in (B, W):
                    task.makes = 2 * length + (kind == W)
                if rule != FIXED:
                    task.slot = 0 if kind == F else (2 if kind == W else 1)
                    task.priority = _priority(rows, schedule, rule, stage, kind, m)
                _add_inputs(work, n, stage, kind, m, h.stages, count)


@compiled
def _add_inputs(work: Any, n: int, stage: int, kind: int, m: int, stages: int, count: int) -> None:
    """Have an operation wait for its message, or for the operation before it on its device."""
    operation_task, message_task = items(work, OPERATION_TASK), items(work, MESSAGE_TASK)
    if kind == W:
        source = operation_task[(stage * 4 + I) * count + m]
    elif kind == F:
        if stage == 0:
            return
        source = message_task[(stage * 2 + F) * count + m]
    elif stage == stages - 1:
        source = operation_task[(stage * 4 + F) * count + m]
    else:
        source = message_task[stage * 2 * count + m]
    edge(work, source if source >= 0 else n, n)


@compiled
def _priority(rows: Any, schedule: Any, rule: int, stage: int, kind: int, m: int) -> int:
    stages, count = header(rows, ROWS).stages, header(rows, ROWS).microbatches
    if rule == BACKWARD_FIRST:
        rank = 1 if kind == F else (2 if kind == W else 0)
        return int((rank * count + m) * stages + stages - 1 - stage)
    if rule == FORWARD_FIRST:
        rank = 0 if kind == F else (2 if kind == W else 1)
        return int((rank * count + m) * stages + stage)
    due_s, period_s = items(schedule, DUE_S), items(schedule, PERIOD_S)[0]
    return int(np.rint((m * period_s + due_s[kind * stages + stage]) / TICK_S))


# --- devices, replicas and what operations hold ---------------------------------------------------


@compiled
def fill_devices(rows: Any, schedule: Any, wires: Any, program: Any, work: Any) -> None:
    """Fill in devices, replicas and orders."""
    h, numbers = header(rows, ROWS), header(program, PROGRAM)
    _fill_hosts(rows, wires, program)
    rule = header(schedule, SCHEDULE).rule
    numbers.mode = IN_ORDER if rule == FIXED else BY_PRIORITY
    numbers.devices, numbers.replicas = h.devices, h.replicas
    for n in range(h.replicas):
        row(program, REPLICAS, n).microbatches = 0
    owner = items(schedule, OWNER)
    for place in range(h.stages * h.microbatches):
        if owner[place] >= 0:
            row(program, REPLICAS, owner[place]).microbatches += 1
    for n in range(h.devices):
        device, found = row(program, DEVICES, n), row(rows, DEVICE, n)
        device.static_bytes, device.capacity_bytes = found.static_bytes, found.capacity_bytes
        device.reserve_bytes = 0 if rule == FIXED else items(schedule, RESERVE_BYTES)[n]
        device.replica = device.replica_end = 0
        device.order = device.order_end = 0
    _fill_replicas(rows, schedule, program, rule)
    if rule == FIXED:
        _fill_orders(rows, schedule, program, work)
        return
    first = 0
    for n in range(h.devices):
        device = row(program, DEVICES, n)
        device.order, first = first, first + device.order_end
        device.order_end = first


@compiled
def _fill_hosts(rows: Any, wires: Any, program: Any) -> None:
    """Fill in which devices slow each other on their host, or by what they send and receive."""
    numbers, h = header(program, PROGRAM), header(wires, WIRES)
    numbers.is_slowed, numbers.hosts = 0, 0
    for n in range(header(rows, ROWS).devices):
        device, number = row(program, DEVICES, n), row(rows, DEVICE, n).number
        device.compute_slowdown = items(wires, COMPUTE_SLOWDOWN)[number]
        device.message_slowdown = items(wires, MESSAGE_SLOWDOWN)[number]
        device.host = items(wires, HOST_OF)[number]
        is_slowed = device.host >= 0
        is_slowed |= device.compute_slowdown > 1 or device.message_slowdown > 1
        device.is_slowed = is_slowed
        numbers.is_slowed |= is_slowed
    if h.is_slowed:
        numbers.hosts = h.hosts
        for host in range(h.hosts):
            row(program, HOSTS, host).slowdown = host * h.most_of_host
        for place in range(h.hosts * h.most_of_host):
            items(program, SLOWDOWNS)[place] = items(wires, SLOWDOWN)[place]


@compiled
def _fill_replicas(rows: Any, schedule: Any, program: Any, rule: int) -> None:
    h, device_replicas = header(rows, ROWS), items(program, DEVICE_REPLICAS)
    for n in range(h.replicas):
        replica, found = row(program, REPLICAS, n), row(rows, REPLICA, n)
        replica.device, replica.stage = found.device, found.stage
        stage = row(rows, STAGE, found.stage)
        replica.stash_bytes = _stash_bytes(rows, schedule, found.stage, rule)
        replica.weight_stash_bytes = stage.weight_stash_bytes
        replica.input_bytes, replica.output_bytes = stage.input_bytes, stage.output_bytes
        replica.input_gradient_bytes = stage.input_gradient_bytes
        replica.output_gradient_bytes = stage.output_gradient_bytes
        device = row(program, DEVICES, found.device)
        device.replica_end += 1
        _fill_effects(rows, program, n, replica.stash_bytes)
        if rule != FIXED:
            replica.is_split = items(schedule, IS_SPLIT)[found.stage]
            replica.limit = items(schedule, LIMIT)[n]
            replica.most_owed = items(schedule, MOST_OWED)[n]
            device.order_end += replica.microbatches * (3 if replica.is_split else 2)
    first = 0
    for n in range(h.devices):
        device = row(program, DEVICES, n)
        device.replica, first = first, first + device.replica_end
        device.replica_end = device.replica
    for n in range(h.replicas):
        device = row(program, DEVICES, row(rows, REPLICA, n).device)
        device_replicas[device.replica_end] = n
        device.replica_end += 1


@inlined
def _stash_bytes(rows: Any, schedule: Any, s: int, rule: int) -> int:
    """Return what a microbatch in flight holds: while devices list, what is never offloaded."""
    stage = row(rows, STAGE, s)
    if rule == FIXED or items(schedule, IS_SPLIT)[s]:
        return stage.stash_bytes
    return stage.stash_bytes - stage.offload_bytes


@compiled
def _fill_effects(rows: Any, program: Any, n: int, stash_bytes: int) -> None:
    """Fill in what the operations of a replica hold and free, by kind."""
    found = row(rows, REPLICA, n)
    stage, is_last = row(rows, STAGE, found.stage), found.stage == header(rows, ROWS).stages - 1
    gradient = 0 if is_last else stage.output_gradient_bytes
    for kind in range(4):
        effect = row(program, EFFECTS, 4 * n + kind)
        effect.start_device = effect.end_device = found.device
        effect.start_bytes = effect.end_bytes = 0
        if kind == F:
            # The input, counted on arrival, becomes part of the stash.
            effect.start_bytes = stash_bytes - stage.input_bytes + stage.output_bytes
        elif kind == B:
            effect.start_bytes = stage.input_gradient_bytes
            effect.end_bytes = -gradient - stash_bytes
        elif kind == I:
            effect.start_bytes = stage.input_gradient_bytes + found.split_extra_bytes
            effect.end_bytes = stage.weight_stash_bytes - stash_bytes - gradient
            effect.end_bytes -= found.split_extra_bytes
        else:
            effect.end_bytes = -stage.weight_stash_bytes


@compiled
def _fill_orders(rows: Any, schedule: Any, program: Any, work: Any) -> None:
    order, codes = items(program, ORDER), items(schedule, ORDER_CODES)
    start, operation_task = items(schedule, ORDER_START), items(work, OPERATION_TASK)
    for n in range(header(rows, ROWS).devices):
        device = row(program, DEVICES, n)
        device.order, device.order_end = start[n], start[n + 1]
        for place in range(start[n], start[n + 1]):
            order[place] = operation_task[codes[place]]
