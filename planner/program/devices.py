"""Devices at work: starts of tasks, and computations that others slow down.

While k devices of a host compute, each takes the host's k-th slowdown times as long as alone, and
one that also communicates its type's factor times as long again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.choice import most_urgent, next_in_order, touch
from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.events import end_code, push
from planner.program.memory import ceases_to_hold, starts_to_hold
from planner.program.program import (
    AHEAD,
    BY_PRIORITY,
    DEVICES,
    GROUP_DEVICES,
    GROUPS,
    HOSTS,
    PROGRAM,
    REPLICAS,
    SLOWDOWNS,
    TASKS,
)
from planner.program.release import release, release_successors
from planner.program.sharing import moment
from planner.program.work import (
    AT_WORK,
    GROUP_LEFT,
    MACHINES,
    MADES,
    REPLICA_STATES,
    RUNNING,
    STATES,
    TOO_LONG,
    WORK,
)


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
    if task.at_start >= 0 and release(p, w, task.at_start, n, now):
        release_successors(p, w, task.at_start, now)


@compiled
def finish(p: int, w: int, n: int, now: float) -> None:
    """End a task of a device, unless that is slowed and another moment has been announced since."""
    task = row(p, TASKS, n)
    machine = row(w, MACHINES, task.resource)
    if row(p, DEVICES, task.resource).is_slowed:
        if machine.running != n or row(w, STATES, n).end_s != now:
            return
        machine.running = -1
        machine.free_at_s = now
        machine.done_s = max(machine.done_s, now)
        _forget_running(w, task.resource)
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


@compiled
def _forget_running(w: int, d: int) -> None:
    state, running = header(w, WORK), items(w, RUNNING)
    kept = 0
    for i in range(state.n_running):
        if running[i] != d:
            running[kept] = running[i]
            kept += 1
    state.n_running = kept
    state.load_changed = 1


@compiled
def settle_load(p: int, w: int, now: float) -> None:
    """Give computations that are slowed their rates, once a moment's events have been handled."""
    state, running = header(w, WORK), items(w, RUNNING)
    if not state.load_changed:
        return
    state.load_changed = 0
    count_at_work(p, w)
    for i in range(state.n_running):
        machine = row(w, MACHINES, running[i])
        n = machine.running
        task, times = row(p, TASKS, n), row(w, STATES, n)
        share = 1 / (host_slowdown(p, w, running[i]) * _by_communication(p, w, running[i]))
        take_share(machine, times.start_s, task.seconds, share, now)
        if times.end_s != machine.end_s:
            times.end_s = machine.end_s
            push(w, machine.end_s, end_code(p, n))
        if task.makes >= 0:
            _announce_gradients(p, w, n, now)


@inlined
def take_share(machine: Any, start_s: float, seconds: float, share: float, now: float) -> None:
    """Let what a device computes go on with a share of its rate."""
    if share != machine.share:
        machine.due_s += (now - machine.since_s) * (1 - machine.share)
        machine.since_s, machine.share = now, share
        machine.end_s = moment(start_s, seconds, machine.due_s, now, share, 0.0, now)


@compiled
def count_at_work(p: int, w: int) -> None:
    """Count the devices of each host that compute."""
    at_work, running = items(w, AT_WORK), items(w, RUNNING)
    for i in range(header(p, PROGRAM).hosts):
        at_work[i] = 0
    for i in range(header(w, WORK).n_running):
        host = row(p, DEVICES, running[i]).host
        if host >= 0:
            at_work[host] += 1


@inlined
def host_slowdown(p: int, w: int, d: int) -> float:
    """Return how many times as long a device takes by what its host's devices compute."""
    host = row(p, DEVICES, d).host
    if host < 0:
        return 1.0
    return items(p, SLOWDOWNS)[row(p, HOSTS, host).slowdown + items(w, AT_WORK)[host] - 1]


@inlined
def _by_communication(p: int, w: int, d: int) -> float:
    return row(p, DEVICES, d).compute_slowdown if row(w, MACHINES, d).under_way > 0 else 1.0
