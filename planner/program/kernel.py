"""The replay of a program: one loop over moments, in compiled code.

At each moment all that ends then ends, in the order of the events' codes; then devices start what
they can, late flows that have become ready are requested, and links and slowed computations are
timed anew. A call allocates nothing, so it needs no lock of Python.
"""

from __future__ import annotations

import numpy as np

from planner.program.compiled import compiled, entry, header, inlined, items, pointer, row
from planner.program.devices import (
    finish,
    release,
    release_successors,
    run_next,
    settle_load,
    step_now,
)
from planner.program.events import (
    add_ready,
    ceases_to_hold,
    end_code,
    note_peaks,
    pop,
    push,
    ready_code,
    touch,
)
from planner.program.network import ends_now, request, settle
from planner.program.program import (
    BY_PRIORITY,
    COMPUTE,
    DEVICES,
    GROUPS,
    LATE_FLOW,
    MAKERS,
    PROGRAM,
    REPLICAS,
    STEP,
    SUCCESSORS,
    TASKS,
)
from planner.program.work import (
    DEADLOCK,
    EVENTS,
    FLOWS,
    GROUP_LEFT,
    LINES,
    LINKS,
    MACHINES,
    MADES,
    OK,
    QUEUES,
    READY,
    REPLICA_STATES,
    STATES,
    TOO_SMALL,
    TOUCHED,
    WORK,
)

# --- the beginning --------------------------------------------------------------------------------


@compiled
def _has_room(p: int, w: int) -> bool:
    """Return whether the memory is as large as a program needs, but for its nodes and events."""
    h, state = header(p, PROGRAM), header(w, WORK)
    return bool(
        state.states_rows >= h.tasks
        and state.stack_rows >= max(h.links + h.link_uses, 3 * h.tasks)
        and state.machines_rows >= h.devices
        and state.replica_states_rows >= h.replicas
        and state.mades_rows >= h.makers
        and state.links_rows >= h.links
        and state.lines_rows >= h.lines
        and state.group_left_rows >= h.groups
        and state.at_work_rows >= h.hosts
        and state.ran_rows >= row(p, DEVICES, h.devices - 1).order_end
    )


@compiled
def _begin(p: int, w: int) -> None:
    """Have everything wait at time 0, and release what waits for nothing."""
    h, state = header(p, PROGRAM), header(w, WORK)
    state.n_events = state.n_changed = state.n_found = state.n_ready = state.n_dirty = 0
    state.n_running = state.n_slowed = state.n_line_nodes = state.n_link_nodes = 0
    state.stamp = state.load_changed = state.n_touched = 0
    state.computations = state.started = 0
    state.moment, state.status, state.time_s = 1, OK, 0.0
    _begin_devices(p, w)
    _begin_links(p, w)
    for n in range(h.tasks):
        task, times = row(p, TASKS, n), row(w, STATES, n)
        times.left, times.cause = task.waits, -1
        times.start_s = times.end_s = np.inf
        if task.role == STEP:
            times.left, times.start_s = 0, 0.0
        elif task.role == COMPUTE:
            row(w, MACHINES, task.resource).left_s += task.seconds
            state.computations += 1
        else:
            row(w, FLOWS, n).is_active = 0
    for n in range(h.tasks):
        task = row(p, TASKS, n)
        if task.waits == 0 and task.role != STEP:
            release(p, w, n, -1, 0.0)


@compiled
def _begin_devices(p: int, w: int) -> None:
    h = header(p, PROGRAM)
    for d in range(h.devices):
        machine, device = row(w, MACHINES, d), row(p, DEVICES, d)
        machine.held_bytes = machine.peak_bytes = device.static_bytes
        machine.done_s = machine.free_at_s = 0.0
        machine.left_s = row(p, TASKS, device.step).seconds if device.step >= 0 else 0.0
        machine.count = machine.under_way = machine.held_by = machine.moment = machine.is_dirty = 0
        machine.last = machine.running = machine.pending = -1
        touch(w, d)
    place = 0
    for r in range(h.replicas):
        counts, microbatches = row(w, REPLICA_STATES, r), row(p, REPLICAS, r).microbatches
        counts.left, counts.in_flight, counts.owed = microbatches, 0, 0
        if h.mode == BY_PRIORITY:
            for slot in range(3):
                queue = row(w, QUEUES, 3 * r + slot)
                queue.first, queue.head, queue.tail = place, 0, 0
                place += microbatches
    if place > header(w, WORK).queued_rows:
        header(w, WORK).status = TOO_SMALL
    for j in range(h.makers):
        made = row(w, MADES, j)
        made.due_s = made.made_s = np.inf
    left = items(w, GROUP_LEFT)
    for group in range(h.groups):
        of = row(p, GROUPS, group)
        left[group] = of.device_end - of.device


@compiled
def _begin_links(p: int, w: int) -> None:
    h = header(p, PROGRAM)
    for n in range(h.links):
        link = row(w, LINKS, n)
        link.head = link.tail = -1
        link.is_changed = link.was_full = link.users = link.seen = 0
        link.demand = 0.0
    for n in range(h.lines):
        line = row(w, LINES, n)
        line.head = line.tail = -1


# --- the loop -------------------------------------------------------------------------------------


@compiled
def _loop(p: int, w: int) -> None:
    """Go from moment to moment until nothing more is announced."""
    state = header(w, WORK)
    first = row(w, EVENTS, 0)
    now = 0.0
    if state.n_events:
        now = min(now, first.time_s)
    while True:
        for i in range(state.n_touched):
            run_next(p, w, items(w, TOUCHED)[i], now)
        if state.n_ready:
            _request_ready(p, w, now)
        if state.n_changed or state.n_slowed:
            settle(p, w, now)
        if state.load_changed:
            settle_load(p, w, now)
        if state.n_events == 0 or state.status != OK:
            return
        if first.time_s > now:
            note_peaks(w)
            now = first.time_s
        state.n_touched = 0
        state.moment += 1
        while state.n_events > 0 and first.time_s == now:
            _handle(p, w, pop(w), now)


@inlined
def _handle(p: int, w: int, code: int, now: float) -> None:
    """Let happen what an event announces."""
    h = header(p, PROGRAM)
    if code >= h.first_late:
        if code < h.first_late + h.makers:
            _make(p, w, code - h.first_late, now)
            return
        code -= h.makers
        if code >= h.tasks:
            add_ready(w, code - h.tasks)
            return
        if row(p, TASKS, code).role == STEP:
            step_now(p, w, code, now)
            return
    if row(p, TASKS, code).role == COMPUTE:
        finish(p, w, code, now)
    elif ends_now(p, w, code, now):
        task = row(p, TASKS, code)
        ceases_to_hold(p, w, task.effect)
        if task.role == LATE_FLOW:
            state = header(w, WORK)
            state.time_s = max(state.time_s, now)
        release_successors(p, w, code, now)


@compiled
def _make(p: int, w: int, maker: int, now: float) -> None:
    """Note that a replica has made a bucket, unless it has already or another moment counts."""
    made = row(w, MADES, maker)
    if made.due_s == now and made.made_s == np.inf:
        made.made_s = now
        n = items(p, MAKERS)[maker]
        release(p, w, n, -1, now)


@compiled
def _request_ready(p: int, w: int, now: float) -> None:
    """Request late flows in the order of their numbers."""
    state, ready = header(w, WORK), items(w, READY)
    for i in range(1, state.n_ready):
        n = ready[i]
        j = i
        while j > 0 and ready[j - 1] > n:
            ready[j] = ready[j - 1]
            j -= 1
        ready[j] = n
    for i in range(state.n_ready):
        request(p, w, ready[i], now)
    state.n_ready = 0


# --- the end --------------------------------------------------------------------------------------


@compiled
def _step(p: int, w: int) -> None:
    """Time the optimizer steps, which start when a device has done all else.

    Those of devices whose host slows them are events of the loop; others take what they take.
    """
    state, devices = header(w, WORK), header(p, PROGRAM).devices
    for d in range(devices):
        n, machine = row(p, DEVICES, d).step, row(w, MACHINES, d)
        if n < 0:
            state.time_s = max(state.time_s, machine.done_s)
            continue
        times = row(w, STATES, n)
        if machine.done_s > times.start_s:
            times.start_s, times.cause = machine.done_s, machine.last
        times.end_s = times.start_s + row(p, TASKS, n).seconds
        if row(p, DEVICES, d).host >= 0:
            push(w, times.start_s, end_code(p, n))
    if state.n_events:
        _loop(p, w)
    for d in range(devices):
        n = row(p, DEVICES, d).step
        if n >= 0:
            state.time_s = max(state.time_s, row(w, STATES, n).end_s)
            _release_after_step(p, w, n)


@compiled
def _release_after_step(p: int, w: int, n: int) -> None:
    """Have all-gathers wait for one optimizer step less."""
    task, step, successors = row(p, TASKS, n), row(w, STATES, n), items(p, SUCCESSORS)
    for i in range(task.successor, task.successor_end):
        times = row(w, STATES, successors[i])
        times.left -= 1
        if times.start_s == np.inf or step.end_s > times.start_s:
            times.start_s, times.cause = step.end_s, n
        if times.left == 0:
            push(w, times.start_s, ready_code(p, successors[i]))


@compiled
def replay_in(p: int, w: int) -> int:
    """Replay a program in memory for it; return how that went.

    Args:
        p: pointer to the header of a :class:`Program`.
        w: pointer to the header of a :class:`Work`.

    Returns:
        ``OK``; ``DEADLOCK`` if something waits for ever; ``NEVER_ENDS`` if something takes for
        ever, as a message where no path is; ``TOO_LONG`` if the time is certain to be more than the
        most asked for; ``HEAP_FULL`` or ``TOO_SMALL`` if the memory is.
    """
    state = header(w, WORK)
    if not _has_room(p, w):
        return TOO_SMALL
    _begin(p, w)
    if state.status == OK:
        _loop(p, w)
    if state.status != OK:
        return state.status
    note_peaks(w)
    for d in range(header(p, PROGRAM).devices):
        device, machine = row(p, DEVICES, d), row(w, MACHINES, d)
        if machine.count < device.order_end - device.order or machine.pending >= 0:
            return DEADLOCK
    state.n_touched = 0
    _step(p, w)
    if state.n_events:
        _loop(p, w)
    return state.status


@entry
def replay_once(program: np.ndarray, work: np.ndarray) -> int:
    """Replay a program; both arguments are headers."""
    return replay_in(pointer(program), pointer(work))
