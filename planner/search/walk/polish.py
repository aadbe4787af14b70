"""Annealing over the orders of operations of a given layout, compiled.

An operation moves along the order of its device, as far as operations of its own kind and of its
own microbatch let it; where replicas form equal pipelines, it moves in all of them. The program is
replayed, and what does not fit memory is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, entry, header, items, pointer, pointer_at, row
from planner.program.program import ORDER, PROGRAM
from planner.program.schedule import ORDER_CODES, ORDER_START, SCHEDULE
from planner.program.stage_rows import ROWS
from planner.program.work import MACHINES, WORK
from planner.search.walk.calls import call
from planner.search.walk.judge import fits
from planner.search.walk.memory import BEST_CODES, RANDOM, WALK
from planner.search.walk.random import below, uniform

USUAL_WAY, LONG_WAY = 6, 30
"""The most places that an operation moves, mostly and now and then."""
EARLINESS = 0.02
"""Weight of the mean time at which devices are done, which tells orders of equal length apart."""


@entry
def polish(memory: Any, heat: float, tries: int) -> float:
    """Try changes of the order in the schedule; return the seconds of the best order found.

    The best order is in BEST_CODES. Before the first call ``polished_s`` is infinite.

    Args:
        memory: header of the memory of a walk, whose rows and schedule are those of a layout.
        heat: see :func:`planner.search.walk.steps.run_walk`.
        tries: number of changes.
    """
    w = pointer(memory)
    h, state = header(w, WALK), items(w, RANDOM)
    if h.polished_s == np.inf:
        h.lowers = 1
        h.polished_s = call(h.replay_at, w)
        h.energy_s = _energy_s(w, h.polished_s)
        _keep(w)
    for _ in range(tries):
        h.lowers = h.blocks
        h.tasks += 1  # a change is work too, where none is possible
        begin, end = _draw(w)
        if begin == end:
            continue
        _rotate_all(w, begin, end)
        time_s = call(h.replay_at, w)
        most_s = h.energy_s * (1 - heat * np.log(max(1e-12, uniform(state))))
        energy_s = _energy_s(w, time_s)
        if energy_s > most_s or not fits(w):
            _rotate_all(w, end, begin)
            continue
        h.energy_s = energy_s
        if time_s < h.polished_s:
            h.polished_s = time_s
            _keep(w)
    h.lowers = 1
    return h.polished_s


@compiled
def _energy_s(w: Any, time_s: float) -> float:
    if time_s == np.inf:
        return time_s
    h = header(w, WALK)
    work, devices = pointer_at(h.work, WORK), header(pointer_at(h.rows, ROWS), ROWS).devices
    total_s = 0.0
    for d in range(devices):
        total_s += row(work, MACHINES, d).done_s
    return time_s + EARLINESS * total_s / devices


@compiled
def _keep(w: Any) -> None:
    """Keep the order as the best one."""
    h = header(w, WALK)
    schedule, devices = (
        pointer_at(h.schedule, SCHEDULE),
        header(pointer_at(h.rows, ROWS), ROWS).devices,
    )
    for i in range(items(schedule, ORDER_START)[devices]):
        items(w, BEST_CODES)[i] = items(schedule, ORDER_CODES)[i]


@compiled
def _draw(w: Any) -> Any:
    """Draw an operation and a place that it may move to; both are equal if it may not move."""
    h, state = header(w, WALK), items(w, RANDOM)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    codes, start = items(schedule, ORDER_CODES), items(schedule, ORDER_START)
    device, total = below(state, header(rows, ROWS).devices), header(rows, ROWS).microbatches
    first, last = start[device], start[device + 1]
    if last - first < 2:
        return first, first
    begin = first + below(state, last - first)
    way = 1 + below(state, LONG_WAY if uniform(state) < 0.2 else USUAL_WAY)
    by = 2 * below(state, 2) - 1
    what, microbatch, end = codes[begin] // total, codes[begin] % total, begin
    for _ in range(way):
        place = end + by
        if place < first or place >= last or codes[place] // total == what:
            break
        if codes[place] // total // 4 == what // 4 and codes[place] % total == microbatch:
            break
        end = place
    return begin, end


@compiled
def _rotate_all(w: Any, begin: int, end: int) -> None:
    """Move an operation to another place, in all pipelines if there are several equal ones."""
    h = header(w, WALK)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    codes, start = items(schedule, ORDER_CODES), items(schedule, ORDER_START)
    devices, total = header(rows, ROWS).devices, header(rows, ROWS).microbatches
    own = 0
    while start[own + 1] <= begin:
        own += 1
    head = _first_operation(codes, start, own, total)
    for device in range(devices):
        if device == own or (h.equal and _first_operation(codes, start, device, total) == head):
            _rotate(w, begin - start[own] + start[device], end - start[own] + start[device])


@compiled
def _first_operation(codes: Any, start: Any, device: int, total: int) -> int:
    """Return the lowest stage of a device, by which those of equal pipelines are alike."""
    lowest = -1
    for i in range(start[device], start[device + 1]):
        stage = codes[i] // total // 4
        if lowest < 0 or stage < lowest:
            lowest = stage
    return lowest


@compiled
def _rotate(w: Any, begin: int, end: int) -> None:
    """Move what is at a place to another, and what is between by one place."""
    h = header(w, WALK)
    codes = items(pointer_at(h.schedule, SCHEDULE), ORDER_CODES)
    order = items(pointer_at(h.program, PROGRAM), ORDER)
    by = 1 if end > begin else -1
    code, task, at = codes[begin], order[begin], begin
    while at != end:
        codes[at], order[at] = codes[at + by], order[at + by]
        at += by
    codes[end], order[end] = code, task
