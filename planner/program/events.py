"""What a replay has still to come to, and what devices hold meanwhile.

The moments to come are a binary heap. What devices hold is changed by tasks as they start and end;
a peak is what lasts for a moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.program import EFFECTS, PROGRAM
from planner.program.work import (
    DIRTY,
    EVENTS,
    HEAP_FULL,
    MACHINES,
    NEVER_ENDS,
    READY,
    TOUCHED,
    WORK,
)

# An event's code tells what happens, and in which order events of one moment are handled: tasks
# below `first_late` end, or their first bytes set off; gradients are made; later tasks end; flows
# are ready that wait for optimizer steps.


@inlined
def end_code(p: int, n: int) -> int:
    """Return the code of the end of a task."""
    h = header(p, PROGRAM)
    return n + (h.makers if n >= h.first_late else 0)


@inlined
def ready_code(p: int, n: int) -> int:
    """Return the code of a task that waited for optimizer steps."""
    h = header(p, PROGRAM)
    return n + h.makers + h.tasks


@inlined
def push(w: int, time_s: float, code: int) -> None:
    """Announce an event; one that never comes ends the replay."""
    state = header(w, WORK)
    n = state.n_events
    if not time_s < np.inf:
        state.status = NEVER_ENDS
        return
    if n >= state.events_rows:
        state.status = HEAP_FULL
        return
    state.n_events = n + 1
    while n > 0:
        up = (n - 1) >> 1
        above = row(w, EVENTS, up)
        if above.time_s < time_s or (above.time_s == time_s and above.code <= code):
            break
        hole = row(w, EVENTS, n)
        hole.time_s = above.time_s
        hole.code = above.code
        n = up
    hole = row(w, EVENTS, n)
    hole.time_s = time_s
    hole.code = code


@compiled
def pop(w: int) -> int:
    """Take the first event out; return its code."""
    state = header(w, WORK)
    top = row(w, EVENTS, 0).code
    n = state.n_events - 1
    state.n_events = n
    moved = row(w, EVENTS, n)
    time_s, code = moved.time_s, moved.code
    at = 0
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        x = row(w, EVENTS, child)
        if child + 1 < n:
            y = row(w, EVENTS, child + 1)
            is_second = (y.time_s < x.time_s) | ((y.time_s == x.time_s) & (y.code < x.code))
            child += is_second
            x = row(w, EVENTS, child)
        if time_s < x.time_s or (time_s == x.time_s and code <= x.code):
            break
        hole = row(w, EVENTS, at)
        hole.time_s = x.time_s
        hole.code = x.code
        at = child
    hole = row(w, EVENTS, at)
    hole.time_s = time_s
    hole.code = code
    return top


_LEAST, _MOST = -11, 22
_TEN = np.array([float(f"1e{k}") for k in range(_LEAST, _MOST + 1)])


@compiled
def twelve_digits(x: float) -> float:
    """Return ``float(f"{x:.12g}")`` for 1e-11 < x < 1e11, else ``x``.

    What ends at one moment but for rounding errors does so once it is rounded.
    """
    if not (1e-11 < x < 1e11):
        return x
    e = 0
    while x >= _TEN[e + 1 - _LEAST]:
        e += 1
    while x < _TEN[e - _LEAST]:
        e -= 1
    scale = _TEN[11 - e - _LEAST]  # 10 ** (11 - e), which is exact up to 10 ** 22
    product = x * scale
    # The exact product is product + error (Dekker 1971, A floating-point technique for extending
    # the available precision).
    high = 134217729.0 * x
    x_high = high - (high - x)
    x_low = x - x_high
    high = 134217729.0 * scale
    s_high = high - (high - scale)
    s_low = scale - s_high
    error = ((x_high * s_high - product) + x_high * s_low + x_low * s_high) + x_low * s_low
    rounded = np.rint(product)
    rest = (product - rounded) + error
    if rest > 0.5 or (rest == 0.5 and rounded % 2 == 1):
        rounded += 1.0
    elif rest < -0.5 or (rest == -0.5 and rounded % 2 == 1):
        rounded -= 1.0
    return rounded / scale


@inlined
def moment(
    start_s: float,
    seconds: float,
    due_s: float,
    since_s: float,
    share: float,
    left_s: float,
    now: float,
) -> float:
    """Return when all but ``left_s`` of something is done, if its share stays; at least now.

    Args:
        start_s: when it began.
        seconds: that it takes at its full rate.
        due_s: when it would end if it had all its rate from now on.
        since_s: since when it has its share.
        share: of its full rate.
        left_s: of its seconds.
        now: the present moment.
    """
    until_s = due_s - left_s
    if due_s == start_s + seconds and share == 1:
        return max(now, until_s)
    return max(now, twelve_digits(since_s + (until_s - since_s) / share))


# --- devices --------------------------------------------------------------------------------------


@inlined
def touch(w: int, d: int) -> None:
    """Have a device look for something to run at the end of the moment."""
    state, machine = header(w, WORK), row(w, MACHINES, d)
    if machine.moment != state.moment:
        machine.moment = state.moment
        items(w, TOUCHED)[state.n_touched] = d
        state.n_touched += 1


@inlined
def _change(w: int, d: int, bytes_: int) -> None:
    machine = row(w, MACHINES, d)
    machine.held_bytes += bytes_
    if not machine.is_dirty:
        state = header(w, WORK)
        machine.is_dirty = 1
        items(w, DIRTY)[state.n_dirty] = d
        state.n_dirty += 1


@inlined
def starts_to_hold(p: int, w: int, effect: int) -> None:
    """Change what a device holds as a task with this effect starts."""
    if effect >= 0:
        change = row(p, EFFECTS, effect)
        if change.start_bytes != 0:
            _change(w, change.start_device, change.start_bytes)


@inlined
def ceases_to_hold(p: int, w: int, effect: int) -> None:
    """Change what a device holds as a task with this effect ends."""
    if effect >= 0:
        change = row(p, EFFECTS, effect)
        if change.end_bytes != 0:
            _change(w, change.end_device, change.end_bytes)


@compiled
def note_peaks(w: int) -> None:
    """Note what devices hold at the end of a moment."""
    state, dirty = header(w, WORK), items(w, DIRTY)
    for i in range(state.n_dirty):
        machine = row(w, MACHINES, dirty[i])
        machine.is_dirty = 0
        if machine.held_bytes > machine.peak_bytes:
            machine.peak_bytes = machine.held_bytes
    state.n_dirty = 0


# --- lists ----------------------------------------------------------------------------------------


@inlined
def add_ready(w: int, n: int) -> None:
    """Have a late flow be requested at the end of the moment."""
    state = header(w, WORK)
    items(w, READY)[state.n_ready] = n
    state.n_ready += 1


@compiled
def forget(numbers: Any, count: int, number: int) -> int:
    """Take a number out of the first of a list; return how many are left."""
    kept = 0
    for i in range(count):
        if numbers[i] != number:
            numbers[kept] = numbers[i]
            kept += 1
    return kept
