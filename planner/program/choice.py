"""What a device runs next: in a given order, or what is most urgent and limits and memory allow."""

from __future__ import annotations

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.events import touch
from planner.program.program import (
    BY_PRIORITY,
    DEVICE_REPLICAS,
    DEVICES,
    ORDER,
    PROGRAM,
    REPLICAS,
    TASKS,
)
from planner.program.work import (
    MACHINES,
    QUEUED,
    QUEUES,
    RAN,
    REPLICA_STATES,
    STATES,
)


@inlined
def offer(p: int, w: int, n: int) -> None:
    """Note that a task waits for nothing more but its device."""
    if header(p, PROGRAM).mode == BY_PRIORITY:
        _enqueue(p, w, n)
    touch(w, row(p, TASKS, n).resource)


@compiled
def _enqueue(p: int, w: int, n: int) -> None:
    """Put a task into its queue, where tasks stand in the order of their numbers."""
    task = row(p, TASKS, n)
    queue, queued = row(w, QUEUES, 3 * task.replica + task.slot), items(w, QUEUED)
    at = queue.first + queue.tail
    queue.tail += 1
    first = queue.first + queue.head
    while at > first and queued[at - 1] > n:
        queued[at] = queued[at - 1]
        at -= 1
    queued[at] = n


@inlined
def _waiting(w: int, r: int, slot: int) -> int:
    queue = row(w, QUEUES, 3 * r + slot)
    return queue.tail - queue.head


@compiled
def _held_bytes(p: int, w: int, r: int) -> int:
    """Return what microbatches between their operations on a stage hold, and what waits."""
    replica, counts = row(p, REPLICAS, r), row(w, REPLICA_STATES, r)
    held = counts.in_flight * replica.stash_bytes + counts.owed * replica.weight_stash_bytes
    held += _waiting(w, r, 0) * replica.input_bytes
    return held + _waiting(w, r, 1) * replica.output_gradient_bytes


@compiled
def _may_run(p: int, w: int, r: int, slot: int) -> bool:
    """Return whether limits and memory allow what is first in a queue."""
    if slot == 2:
        return True
    replica, counts = row(p, REPLICAS, r), row(w, REPLICA_STATES, r)
    if slot == 0:
        return counts.in_flight < replica.limit and _forward_fits(p, w, r)
    return not replica.is_split or (counts.owed < replica.most_owed and _weights_fit(p, w, r))


@inlined
def _room_bytes(p: int, d: int) -> int:
    device = row(p, DEVICES, d)
    return device.capacity_bytes - device.static_bytes - device.reserve_bytes


@compiled
def _forward_fits(p: int, w: int, r: int) -> bool:
    """Return whether a forward leaves room for a microbatch of every later stage of its device."""
    replica, on_device = row(p, REPLICAS, r), items(p, DEVICE_REPLICAS)
    device = row(p, DEVICES, replica.device)
    held = replica.output_bytes + replica.stash_bytes
    for i in range(device.replica, device.replica_end):
        held += _held_bytes(p, w, on_device[i])
        other = row(p, REPLICAS, on_device[i])
        if other.stage > replica.stage and row(w, REPLICA_STATES, on_device[i]).in_flight == 0:
            held += other.stash_bytes
    if replica.is_split:
        held += max(0, replica.weight_stash_bytes - replica.stash_bytes)
    return held <= _room_bytes(p, replica.device)


@compiled
def _weights_fit(p: int, w: int, r: int) -> bool:
    """Return whether what a weight gradient needs fits, or none is left that would make room."""
    replica, on_device = row(p, REPLICAS, r), items(p, DEVICE_REPLICAS)
    more = replica.weight_stash_bytes - replica.stash_bytes
    if more <= 0:
        return True
    device = row(p, DEVICES, replica.device)
    owes, held = False, 0
    for i in range(device.replica, device.replica_end):
        owes = owes or row(w, REPLICA_STATES, on_device[i]).owed > 0
        held += _held_bytes(p, w, on_device[i])
    room = _room_bytes(p, replica.device)
    return not owes or held + more + replica.input_gradient_bytes <= room


@inlined
def next_in_order(p: int, w: int, d: int) -> int:
    """Return the next task of a free device, once that can run; -1: it waits."""
    device, machine = row(p, DEVICES, d), row(w, MACHINES, d)
    at = device.order + machine.count
    if at < device.order_end:
        n = items(p, ORDER)[at]
        if row(w, STATES, n).left <= 0:
            machine.count += 1
            return n
    return -1


@inlined
def _is_before(p: int, n: int, other: int) -> bool:
    """Return whether a task is more urgent than another."""
    a, b = row(p, TASKS, n), row(p, TASKS, other)
    if a.priority != b.priority:
        return a.priority < b.priority
    return a.microbatch < b.microbatch or (a.microbatch == b.microbatch and n < other)


@compiled
def most_urgent(p: int, w: int, d: int) -> int:
    """Return the most urgent task that a free device may run; -1: it waits."""
    device, machine = row(p, DEVICES, d), row(w, MACHINES, d)
    if machine.held_by > 0:
        return -1
    on_device, queued = items(p, DEVICE_REPLICAS), items(w, QUEUED)
    best, best_replica, best_slot = -1, -1, -1
    for i in range(device.replica, device.replica_end):
        r = on_device[i]
        for slot in range(3):
            queue = row(w, QUEUES, 3 * r + slot)
            if queue.head >= queue.tail:
                continue
            n = queued[queue.first + queue.head]
            if (best < 0 or _is_before(p, n, best)) and _may_run(p, w, r, slot):
                best, best_replica, best_slot = n, r, slot
    if best < 0:
        return -1
    row(w, QUEUES, 3 * best_replica + best_slot).head += 1
    counts = row(w, REPLICA_STATES, best_replica)
    if best_slot == 0:
        counts.in_flight += 1
    elif best_slot == 1:
        counts.in_flight -= 1
        counts.owed += row(p, REPLICAS, best_replica).is_split
    else:
        counts.owed -= 1
    items(w, RAN)[device.order + machine.count] = best
    machine.count += 1
    return best
