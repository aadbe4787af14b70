"""Devices at work: what tasks wait for, their starts, and computations that others slow down.

While k devices of a host compute, each takes the host's k-th slowdown times as long as alone, and
one that also communicates its type's factor times as long again.
"""

from __future__ import annotations

import numpy as np

from planner.program.choice import most_urgent, next_in_order, offer
from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.events import (
    add_ready,
    ceases_to_hold,
    end_code,
    forget,
    moment,
    push,
    starts_to_hold,
    touch,
)
from planner.program.network import request
from planner.program.program import (
    AHEAD,
    BY_PRIORITY,
    COMPUTE,
    DEVICES,
    FLOW,
    GROUP_DEVICES,
    GROUPS,
    HOSTS,
    LATE_FLOW,
    PROGRAM,
    REPLICAS,
    SLOWDOWNS,
    STEP,
    SUCCESSORS,
    TASKS,
)
from planner.program.work import (
    AT_WORK,
    GROUP_LEFT,
    MACHINES,
    MADES,
    REPLICA_STATES,
    RUNNING,
    STACK,
    STATES,
    TOO_LONG,
    WORK,
)


@compiled
def release_successors(p: int, w: int, n: int, now: float) -> None:
    """Release what waits for a task that has ended, and what waits for joins that this ends."""
    task = row(p, TASKS, n)
    successors, stack = items(p, SUCCESSORS), items(w, STACK)
    at, end, by, depth = task.successor, task.successor_end, n, 0
    while True:
        if at == end:
            if depth == 0:
                return
            depth -= 1
            at, end, by = stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2]
            continue
        successor = successors[at]
        at += 1
        if _release(p, w, successor, by, now):
            stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2] = at, end, by
            depth += 1
            join = row(p, TASKS, successor)
            at, end, by = join.successor, join.successor_end, successor


@compiled
def release(p: int, w: int, n: int, by: int, now: float) -> None:
    """Release a task for one that it waits for (-1: none), and what waits for it if it is done."""
    if _release(p, w, n, by, now):
        release_successors(p, w, n, now)


@compiled
def _release(p: int, w: int, n: int, by: int, now: float) -> bool:
    """Release a task for one that it waits for; return whether it is a join that is done now.

    Then its successors are still to be released.
    """
    times, task = row(w, STATES, n), row(p, TASKS, n)
    times.left -= 1
    if times.left > 0:
        return False
    times.cause = by
    if task.role == COMPUTE:
        times.start_s = now
        offer(p, w, n)
    elif task.role == FLOW:
        request(p, w, n, now)
    elif task.role == LATE_FLOW:
        add_ready(w, n)
    elif task.role == STEP:
        times.start_s = now
    else:
        times.start_s = times.end_s = now
        starts_to_hold(p, w, task.effect)
        ceases_to_hold(p, w, task.effect)
        return True
    return False


# --- starts and ends ------------------------------------------------------------------------------


@compiled
def run_next(p: int, w: int, d: int, now: float) -> None:
    """Let a device start what it can.

    Where replicas start together it waits for the others, and if it is the last of them all start.
    """
    machine = row(w, MACHINES, d)
    if machine.free_at_s > now:
        return
    is_free_to_choose = header(p, PROGRAM).mode == BY_PRIORITY
    n = most_urgent(p, w, d) if is_free_to_choose else next_in_order(p, w, d)
    if n < 0:
        return
    group = row(p, TASKS, n).group
    if group < 0:
        _start(p, w, d, n, now)
        return
    machine.free_at_s, machine.pending = np.inf, n
    left = items(w, GROUP_LEFT)
    left[group] -= 1
    if left[group] == 0:
        of, members = row(p, GROUPS, group), items(p, GROUP_DEVICES)
        left[group] = of.device_end - of.device
        _start(p, w, d, n, now)
        machine.pending = -1
        for i in range(of.device, of.device_end):
            member = row(w, MACHINES, members[i])
            if members[i] != d:
                times, last = row(w, STATES, member.pending), member.last
                is_late = times.start_s == now or (last >= 0 and row(w, STATES, last).end_s == now)
                _start(p, w, members[i], member.pending, now)
                if not is_late:
                    times.cause = row(w, STATES, n).cause
                member.pending = -1


@compiled
def _start(p: int, w: int, d: int, n: int, now: float) -> None:
    task, machine, times = row(p, TASKS, n), row(w, MACHINES, d), row(w, STATES, n)
    if machine.last >= 0 and (times.start_s < now or row(w, STATES, machine.last).end_s == now):
        times.cause = machine.last  # It has waited for the device.
    machine.last = n
    times.start_s = now
    times.left = 1  # An order that names it twice waits for ever.
    starts_to_hold(p, w, task.effect)
    state = header(w, WORK)
    if now + machine.left_s > state.most_s:
        state.status = TOO_LONG
    machine.left_s -= task.seconds
    state.started += 1
    if row(p, DEVICES, d).is_slowed:
        _start_slowed(w, d, n, now + task.seconds)
    else:
        end_s = now + task.seconds
        machine.free_at_s = times.end_s = end_s
        machine.done_s = max(machine.done_s, end_s)
        push(w, end_s, end_code(p, n))
    if task.makes >= 0:
        _make_gradients(p, w, n, now)
    if task.at_start >= 0:
        release(p, w, task.at_start, n, now)


@compiled
def finish(p: int, w: int, n: int, now: float) -> None:
    """End a task of a device, unless that is slowed and another moment has been announced since."""
    task = row(p, TASKS, n)
    machine = row(w, MACHINES, task.resource)
    if row(p, DEVICES, task.resource).is_slowed:
        if machine.running != n or row(w, STATES, n).end_s != now:
            return
        machine.free_at_s = now
        machine.done_s = max(machine.done_s, now)
        _stop(w, task.resource)
        if task.makes >= 0:
            _announce_gradients(p, w, n, now)
    ceases_to_hold(p, w, task.effect)
    release_successors(p, w, n, now)
    touch(w, task.resource)


# --- gradients of weights -------------------------------------------------------------------------


@compiled
def _make_gradients(p: int, w: int, n: int, now: float) -> None:
    """Note that a task makes gradients of weights; the last of a replica makes its buckets."""
    task = row(p, TASKS, n)
    replica, counts = row(p, REPLICAS, task.replica), row(w, REPLICA_STATES, task.replica)
    counts.left -= 1
    if counts.left > 0 or row(p, DEVICES, task.resource).is_slowed:
        return
    makers, ahead = header(p, PROGRAM).makers, items(p, AHEAD)
    end_s = row(w, STATES, n).end_s
    for j in range(replica.maker, replica.maker_end):
        _announce_made(p, w, j, max(now, end_s - ahead[task.makes * makers + j]))


@inlined
def _announce_made(p: int, w: int, maker: int, moment_s: float) -> None:
    made = row(w, MADES, maker)
    if made.made_s == np.inf and made.due_s != moment_s:
        made.due_s = moment_s
        push(w, moment_s, header(p, PROGRAM).first_late + maker)


@compiled
def _announce_gradients(p: int, w: int, n: int, now: float) -> None:
    """Announce anew when a slowed task makes the buckets of its replica, if it is its last."""
    task = row(p, TASKS, n)
    if row(w, REPLICA_STATES, task.replica).left > 0:
        return
    replica, machine = row(p, REPLICAS, task.replica), row(w, MACHINES, task.resource)
    makers, ahead, start_s = header(p, PROGRAM).makers, items(p, AHEAD), row(w, STATES, n).start_s
    for j in range(replica.maker, replica.maker_end):
        moment_s = now
        if machine.running == n:
            behind_s = ahead[task.makes * makers + j]
            progress = (machine.due_s, machine.since_s, machine.share)
            moment_s = moment(start_s, task.seconds, *progress, behind_s, now)
        _announce_made(p, w, j, moment_s)


# --- devices that others slow down ----------------------------------------------------------------


@compiled
def _start_slowed(w: int, d: int, n: int, end_s: float) -> None:
    """Have a device compute what may take longer than until ``end_s``."""
    machine, state = row(w, MACHINES, d), header(w, WORK)
    machine.running = n
    machine.free_at_s = np.inf
    machine.due_s = machine.end_s = end_s
    machine.share, machine.since_s = 1.0, 0.0
    row(w, STATES, n).end_s = np.inf
    items(w, RUNNING)[state.n_running] = d
    state.n_running += 1
    state.load_changed = 1


@inlined
def _stop(w: int, d: int) -> None:
    """Have a device that others slow compute nothing any more."""
    state = header(w, WORK)
    row(w, MACHINES, d).running = -1
    state.n_running = forget(items(w, RUNNING), state.n_running, d)
    state.load_changed = 1


@compiled
def step_now(p: int, w: int, n: int, now: float) -> None:
    """Begin an optimizer step on a slowed host, or end it, unless another moment counts."""
    d, times = row(p, TASKS, n).resource, row(w, STATES, n)
    if row(w, MACHINES, d).running == n:
        if times.end_s == now:
            _stop(w, d)
    elif times.start_s == now:
        _start_slowed(w, d, n, now + row(p, TASKS, n).seconds)


@compiled
def settle_load(p: int, w: int, now: float) -> None:
    """Give computations that are slowed their rates, once a moment's events have been handled."""
    state, running = header(w, WORK), items(w, RUNNING)
    if not state.load_changed:
        return
    state.load_changed = 0
    _count_at_work(p, w)
    for i in range(state.n_running):
        d = running[i]
        machine = row(w, MACHINES, d)
        n = machine.running
        task, times = row(p, TASKS, n), row(w, STATES, n)
        share = 1 / (_host_slowdown(p, w, d) * _by_communication(p, w, d))
        if share != machine.share:
            machine.due_s += (now - machine.since_s) * (1 - machine.share)
            machine.since_s, machine.share = now, share
            due_s, seconds = machine.due_s, task.seconds
            machine.end_s = moment(times.start_s, seconds, due_s, now, share, 0.0, now)
        if times.end_s != machine.end_s:
            times.end_s = machine.end_s
            push(w, machine.end_s, end_code(p, n))
        if task.makes >= 0:
            _announce_gradients(p, w, n, now)


@compiled
def _count_at_work(p: int, w: int) -> None:
    """Count the devices of each host that compute."""
    at_work, running = items(w, AT_WORK), items(w, RUNNING)
    for i in range(header(p, PROGRAM).hosts):
        at_work[i] = 0
    for i in range(header(w, WORK).n_running):
        host = row(p, DEVICES, running[i]).host
        if host >= 0:
            at_work[host] += 1


@inlined
def _host_slowdown(p: int, w: int, d: int) -> float:
    """Return how many times as long a device takes by what its host's devices compute."""
    host = row(p, DEVICES, d).host
    if host < 0:
        return 1.0
    return items(p, SLOWDOWNS)[row(p, HOSTS, host).slowdown + items(w, AT_WORK)[host] - 1]


@inlined
def _by_communication(p: int, w: int, d: int) -> float:
    return row(p, DEVICES, d).compute_slowdown if row(w, MACHINES, d).under_way > 0 else 1.0
