"""Annealing over the orders of operations of given stages, compiled.

One or a few operations in a row move along the order of their device, as far as operations of their
own kinds and of their own microbatches let them; where replicas form equal pipelines, they move in
all of them (Kirkpatrick et al. 1983, "Optimization by simulated annealing"). An order is judged by
its longest path first, and replayed where that does not decide; what does not fit memory is
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, entry, header, items, pointer, pointer_at, row
from planner.program.program import ORDER, PROGRAM
from planner.program.schedule import ORDER_CODES, ORDER_START, SCHEDULE
from planner.program.stage_rows import ROWS
from planner.program.work import MACHINES, WORK
from planner.search.orders.calls import call
from planner.search.orders.lists import given_order_s
from planner.search.orders.longest_path import EARLINESS, energy_of_path_s, read_program
from planner.search.orders.memory import BEST_CODES, ORDERS, RANDOM
from planner.search.orders.random import below, uniform

USUAL_WAY, LONG_WAY = 6, 30
"""The most places that operations move, mostly and now and then."""
LONG, SEVERAL = 0.2, 0.3
"""Shares of long ways, and of moves of several operations in a row."""
MOST_AT_ONCE = 4


@entry
def anneal(memory: Any, heat: float, tries: int) -> float:
    """Try changes of the order in the schedule; return the seconds of the best order found.

    The best order is in BEST_CODES. Before the first call ``best_s`` is infinite.

    Args:
        memory: header of the memory of a search over orders.
        heat: a slower order is taken with the probability exp(-x / heat), where it takes 1 + x
            times as long.
        tries: number of changes.
    """
    o = pointer(memory)
    h = header(o, ORDERS)
    if h.best_s == np.inf:
        _begin(o)
    for _ in range(tries):
        h.tasks += 1  # a change is work too, where none is possible
        begin, count, by = _draw(o)
        if by == 0:
            continue
        _shift_all(o, begin, count, by)
        most_s = h.energy_s * (1 - heat * np.log(max(1e-12, uniform(items(o, RANDOM)))))
        energy_s = _energy_s(o, most_s)
        if energy_s > most_s:
            _shift_all(o, begin + by, count, -by)
        else:
            h.energy_s = energy_s
    h.lowers = 1
    return h.best_s


@compiled
def _begin(o: Any) -> None:
    h = header(o, ORDERS)
    h.best_s = call(h.replay_at, o)
    h.energy_s = _energy_of_replay_s(o, h.best_s)
    _keep(o)
    read_program(o)


@compiled
def _energy_s(o: Any, most_s: float) -> float:
    """Return what is to be small, infinite if the order does not fit; keep it if it is the best."""
    h = header(o, ORDERS)
    if h.is_quick:
        energy_s = energy_of_path_s(o, most_s)
        if energy_s > most_s or (h.is_exact and h.is_roomy and h.path_s >= h.best_s):
            return energy_s
    h.lowers = h.blocks
    time_s = given_order_s(o, most_s)
    energy_s = _energy_of_replay_s(o, time_s)
    if energy_s > most_s:
        return np.inf
    if time_s < h.best_s:
        h.best_s = time_s
        _keep(o)
    return energy_s


@compiled
def _energy_of_replay_s(o: Any, time_s: float) -> float:
    if time_s == np.inf:
        return time_s
    h = header(o, ORDERS)
    work, devices = pointer_at(h.work, WORK), header(pointer_at(h.rows, ROWS), ROWS).devices
    total_s = 0.0
    for d in range(devices):
        total_s += row(work, MACHINES, d).done_s
    return time_s + EARLINESS * total_s / devices


@compiled
def _keep(o: Any) -> None:
    """Keep the order as the best one."""
    h = header(o, ORDERS)
    schedule = pointer_at(h.schedule, SCHEDULE)
    devices = header(pointer_at(h.rows, ROWS), ROWS).devices
    for i in range(items(schedule, ORDER_START)[devices]):
        items(o, BEST_CODES)[i] = items(schedule, ORDER_CODES)[i]


# --- changes --------------------------------------------------------------------------------------


@compiled
def _draw(o: Any) -> Any:
    """Draw the place of the first operation to move, how many, and by how many places; 0: none."""
    h, state = header(o, ORDERS), items(o, RANDOM)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    codes, start = items(schedule, ORDER_CODES), items(schedule, ORDER_START)
    device, total = below(state, header(rows, ROWS).devices), header(rows, ROWS).microbatches
    first, last = start[device], start[device + 1]
    if last - first < 2:
        return first, 1, 0
    begin, count = first + below(state, last - first), 1
    way = 1 + below(state, LONG_WAY if uniform(state) < LONG else USUAL_WAY)
    if uniform(state) < SEVERAL:
        count = min(last - begin, 2 + below(state, MOST_AT_ONCE - 1))
    by = 2 * below(state, 2) - 1
    for places in range(way):
        place = begin + count + places if by > 0 else begin - 1 - places
        if place < first or place >= last or not _may_pass(codes, begin, count, place, total):
            return begin, count, by * places
    return begin, count, by * way


@compiled
def _may_pass(codes: Any, begin: int, count: int, place: int, total: int) -> bool:
    """Return whether operations in a row may all change places with another."""
    what, microbatch = codes[place] // total, codes[place] % total
    for i in range(begin, begin + count):
        own = codes[i] // total
        if own == what or (own // 4 == what // 4 and codes[i] % total == microbatch):
            return False
    return True


@compiled
def _shift_all(o: Any, begin: int, count: int, by: int) -> None:
    """Move operations in a row, in all pipelines if there are several equal ones."""
    h = header(o, ORDERS)
    if not h.equal:
        _shift(o, begin, count, by)
        return
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    codes, start = items(schedule, ORDER_CODES), items(schedule, ORDER_START)
    devices, total = header(rows, ROWS).devices, header(rows, ROWS).microbatches
    own = 0
    while start[own + 1] <= begin:
        own += 1
    lowest = _lowest_stage(codes, start, own, total)
    for device in range(devices):
        if device == own or _lowest_stage(codes, start, device, total) == lowest:
            _shift(o, begin - start[own] + start[device], count, by)


@compiled
def _lowest_stage(codes: Any, start: Any, device: int, total: int) -> int:
    """Return the lowest stage of a device, by which those of equal pipelines are alike."""
    lowest = -1
    for i in range(start[device], start[device + 1]):
        stage = codes[i] // total // 4
        if lowest < 0 or stage < lowest:
            lowest = stage
    return int(lowest)


@compiled
def _shift(o: Any, begin: int, count: int, by: int) -> None:
    """Move operations in a row by some places, and those that they pass to where they were."""
    if by > 0:
        for i in range(count - 1, -1, -1):
            _rotate(o, begin + i, begin + i + by)
    else:
        for i in range(count):
            _rotate(o, begin + i, begin + i + by)


@compiled
def _rotate(o: Any, begin: int, end: int) -> None:
    """Move what is at a place to another, and what is between by one place."""
    h = header(o, ORDERS)
    codes = items(pointer_at(h.schedule, SCHEDULE), ORDER_CODES)
    order = items(pointer_at(h.program, PROGRAM), ORDER)
    by = 1 if end > begin else -1
    code, task, at = codes[begin], order[begin], begin
    while at != end:
        codes[at], order[at] = codes[at + by], order[at + by]
        at += by
    codes[end], order[end] = code, task
