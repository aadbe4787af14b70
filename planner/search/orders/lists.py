"""List schedules of given stages, compiled: rules of order under limits, replayed by the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, entry, header, items, pointer, pointer_at, row
from planner.program.lower.offload import offloads
from planner.program.lower.wires import WIRES
from planner.program.program import DEVICES, PROGRAM
from planner.program.schedule import FIXED, RESERVE_BYTES, RHYTHM, SCHEDULE
from planner.program.stage_rows import ROWS
from planner.program.work import MACHINES, WORK
from planner.search.orders.calls import call
from planner.search.orders.given import set_1f1b, take_order
from planner.search.orders.limits import set_limits_in_flight, set_rhythm
from planner.search.orders.memory import MICROBATCH, ORDERS
from planner.search.orders.replay import fits

MOST_CORRECTIONS = 3
"""Tries to keep free what devices lacked."""
ONE_F_ONE_B = 4
"""A rule besides those of :mod:`planner.program.schedule`."""


@entry
def list_schedule(
    memory: Any, rule: int, factor: float, stretch: float, splits: bool, may_stay_whole: bool
) -> float:
    """Schedule the rows for the owners in the schedule, which gets the order that comes out.

    Args:
        memory: header of the memory of a search over orders.
        rule: of order.
        factor: of 1F1B's microbatches in flight, the most that there may be; may be infinite.
        stretch: see :func:`planner.search.orders.limits.set_rhythm`.
        splits: whether backwards are split.
        may_stay_whole: whether some may stay whole then, for want of memory.

    Returns:
        The time of the order in seconds; infinite if it does not fit memory or the rule is not
        defined for the stages.
    """
    o = pointer(memory)
    h = header(o, ORDERS)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    h.lowers, h.best_s = 1, np.inf
    if rule == ONE_F_ONE_B:
        is_defined = not splits and set_1f1b(items(o, MICROBATCH), rows, schedule)
        return given_order_s(o, np.inf) if is_defined else np.inf
    if not set_limits_in_flight(rows, schedule, factor, splits, may_stay_whole):
        return np.inf
    header(schedule, SCHEDULE).rule = rule
    if rule == RHYTHM:
        set_rhythm(rows, schedule, pointer_at(h.wires, WIRES), stretch, splits)
    if with_room_s(o, np.inf) == np.inf:
        return np.inf
    if header(schedule, SCHEDULE).rule != FIXED:
        take_order(rows, schedule, pointer_at(h.program, PROGRAM), pointer_at(h.work, WORK))
    return given_order_s(o, np.inf)


@entry
def replay_order(memory: Any) -> float:
    """Return the time of the order in the schedule; infinite if it deadlocks or does not fit."""
    o = pointer(memory)
    header(o, ORDERS).lowers, header(o, ORDERS).best_s = 1, np.inf
    return given_order_s(o, np.inf)


@compiled
def given_order_s(o: Any, most_s: float) -> float:
    """Return the time of the given order; infinite if it is longer, does not fit, or deadlocks."""
    header(o, ORDERS).most_s = most_s
    time_s = call(header(o, ORDERS).replay_at, o)
    header(o, ORDERS).most_s = np.inf
    return time_s if time_s < np.inf and fits(o) else np.inf


@compiled
def with_room_s(o: Any, most_s: float) -> float:
    """List by the rule in the schedule, with more kept free as long as devices lack memory.

    Where stashes are offloaded the order that comes out is given back and replayed, since only
    copies of given orders are known.

    Args:
        o: pointer to the memory of a search over orders.
        most_s: what takes longer is not made to fit.

    Returns:
        The time in seconds of the last schedule, which may still lack memory.
    """
    h = header(o, ORDERS)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    rule, copies, time_s = header(schedule, SCHEDULE).rule, offloads(rows), np.inf
    h.most_s = np.inf if copies else most_s
    for _ in range(MOST_CORRECTIONS):
        header(schedule, SCHEDULE).rule = rule
        time_s = call(h.replay_at, o)
        if copies and time_s < most_s:
            take_order(rows, schedule, pointer_at(h.program, PROGRAM), pointer_at(h.work, WORK))
            time_s = call(h.replay_at, o)
        if time_s >= most_s or not _reserve(o):
            break
    h.most_s = np.inf
    return time_s


@compiled
def _reserve(o: Any) -> bool:
    """Have list scheduling keep free what devices lacked; return whether any did."""
    h = header(o, ORDERS)
    program, work = pointer_at(h.program, PROGRAM), pointer_at(h.work, WORK)
    reserves, lacked = items(pointer_at(h.schedule, SCHEDULE), RESERVE_BYTES), False
    for d in range(header(program, PROGRAM).devices):
        over = row(work, MACHINES, d).peak_bytes - row(program, DEVICES, d).capacity_bytes
        if over > 0:
            reserves[d] += over
            lacked = True
    return lacked
