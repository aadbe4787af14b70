"""The judge of the walk, compiled: a layout's time is that of its best list schedule, replayed.

For each assignment of microbatches to replicas that is worth trying, operations are scheduled by a
rule of order under limits, while the kernel replays the program. Where messages block, and where
several pipelines run the same order, the order that came out is then replayed as it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.stage_table import TABLE
from planner.program.compiled import compiled, header, items, pointer_at
from planner.program.lower.gradient_tables import GRADIENTS
from planner.program.lower.gradients import fill_gradients
from planner.program.lower.weights import fill_collectives
from planner.program.lower.wires import WIRES
from planner.program.program import PROGRAM
from planner.program.schedule import BACKWARD_FIRST, FIXED, OWNER, RHYTHM, SCHEDULE
from planner.program.stage_rows import ROWS
from planner.program.work import WORK
from planner.search.orders.calls import Apart, call
from planner.search.orders.given import set_1f1b, take_order
from planner.search.orders.limits import set_limits_in_flight, set_rhythm
from planner.search.orders.lists import ONE_F_ONE_B, given_order_s, with_room_s
from planner.search.orders.memory import ORDERS
from planner.search.orders.replay import fits
from planner.search.walk.block import (
    LIMIT_CHOICE,
    OWNER_CHOICE,
    RULE_CHOICE,
    SPLIT_CHOICE,
    copy_block,
    device_at,
    device_of,
    replica_of,
    replicas_in,
    set_start,
)
from planner.search.walk.gather import add_collectives, gather
from planner.search.walk.memory import (
    EACH_S,
    MICROBATCH,
    OWNERS,
    PIPELINE,
    TRIED,
    WALK,
    WHOLE,
)
from planner.search.walk.orders import keep_order, spread_order
from planner.search.walk.owners import assign_all, least_time_s

FACTORS = (2.0, 1.0, 1.5, np.inf, 0.0)
"""Limits in flight, as multiples of 1F1B's; the first is tried first."""
UNLIMITED, ONE_EACH = 3, 4
"""Numbers of two of them; one each is tried only where nothing else fits."""
STRETCHES = (2.5, 4.0)
"""Multiples of a microbatch's least way that it takes among others, in an even rhythm."""
ONLY_BOUND, AS_TOLD = -1.0, -2.0
NEAR = 1.03
"""Within this factor of the best, all rules of order and limits are tried."""


@Apart
def judge_layout(w: Any) -> float:
    """Return the seconds of the best schedule of TRIED; infinite if it has none, or none below.

    If the walk looks closely, all schedules are tried and the best is written to TRIED. If
    ``most_s`` is ONLY_BOUND, a lower bound is returned instead; if it is AS_TOLD, the time of the
    schedule that TRIED names, whose order is left in the schedule.

    Args:
        w: pointer to the memory of the walk.
    """
    h, x = header(w, WALK), items(w, TRIED)
    has_pipelines = h.least_equal and replicas_in(x, 0) > 1
    if not (_prepared_pipeline(x, w) if has_pipelines else _prepared(x, w)):
        return np.inf
    if h.most_s == AS_TOLD:
        return _schedule_again(x, w, has_pipelines)
    count = 1 if has_pipelines else assign_all(w, x[0], x[1], h.microbatches)
    if h.most_s == ONLY_BOUND:
        return _bound_s(w, count)
    h.layouts += 1
    found_s = _best_s(w, count, h.most_s) if h.looks_closely else _chosen_s(w, count, h.most_s)
    if found_s >= h.most_s:
        return np.inf
    return _pipelines_s(x, w) if has_pipelines else found_s


@compiled
def _bound_s(w: Any, count: int) -> float:
    """Return a lower bound on the time of the layout by any of its assignments."""
    least_s = np.inf
    for owner in range(count):
        least_s = min(least_s, least_time_s(w, pointer_at(header(w, WALK).rows, ROWS), owner))
    return least_s


@compiled
def _schedule_again(x: Any, w: Any, has_pipelines: bool) -> float:
    """Schedule TRIED, which is prepared, as it says; leave its order in the schedule."""
    h = header(w, WALK)
    if has_pipelines:
        return _pipelines_s(x, w)
    assign_all(w, x[0], x[1], h.microbatches)
    time_s = _as_told_s(x, w, x[OWNER_CHOICE], np.inf)
    if time_s < np.inf and header(pointer_at(h.schedule, SCHEDULE), SCHEDULE).rule != FIXED:
        _take_order(w)
    return time_s


@compiled
def _take_order(w: Any) -> None:
    h = header(w, WALK)
    take_order(
        pointer_at(h.rows, ROWS),
        pointer_at(h.schedule, SCHEDULE),
        pointer_at(h.program, PROGRAM),
        pointer_at(h.work, WORK),
    )


@Apart
def prepare(w: Any) -> float:
    """Gather the rows of WHOLE, or of PIPELINE without reductions; return 1 if it can run, else 0.

    Args:
        w: pointer to the memory of the walk.
    """
    h = header(w, WALK)
    rows = pointer_at(h.rows, ROWS)
    x = items(w, PIPELINE) if h.of_pipeline else items(w, WHOLE)
    if not gather(x, w, h.share):
        return 0.0
    wires, gradients = pointer_at(h.wires, WIRES), pointer_at(h.gradients, GRADIENTS)
    if h.divides:
        table = pointer_at(h.table, TABLE)
        if not h.of_pipeline and not fill_collectives(rows, table, gradients, wires):
            return 0.0
        add_collectives(x, w)
    return 1.0 if h.of_pipeline or fill_gradients(rows, gradients, wires) else 0.0


@compiled
def _prepared(x: Any, w: Any) -> bool:
    """Gather the rows of a layout; return whether it can run."""
    h = header(w, WALK)
    copy_block(x, items(w, WHOLE))
    h.of_pipeline, h.copies, h.share = 0, 1, h.microbatches
    return call(h.prepare_at, w) == 1.0


# --- the best schedule ----------------------------------------------------------------------------


@compiled
def _best_s(w: Any, count: int, most_s: float) -> float:
    """Return the time of the best schedule over owners, rules of order and limits."""
    h, found_s = header(w, WALK), most_s
    splits, least, usual = h.may_split, 0 if h.may_stay_whole else 1, _usual_rule(w)
    first = UNLIMITED if usual == RHYTHM else 0
    for owner in range(count):
        if least_time_s(w, pointer_at(h.rows, ROWS), owner) < found_s:
            found_s = _tried_s(w, owner, usual, splits, first, found_s)
        if _is_over(w, found_s, most_s):
            break
    is_ruled_out = found_s == most_s and least_time_s(w, pointer_at(h.rows, ROWS), 0) >= most_s
    is_far = NEAR * min(most_s, h.best_s) < found_s < most_s
    if is_ruled_out or is_far or _is_over(w, found_s, most_s):
        return found_s
    for limits in range(ONE_EACH):
        for split in range(splits, least - 1, -1):
            for rule in range(BACKWARD_FIRST, ONE_F_ONE_B + 1):
                for owner in range(count if _is_of_use(w, rule, split) else 0):
                    if _is_over(w, found_s, most_s):
                        return found_s
                    if least_time_s(w, pointer_at(h.rows, ROWS), owner) < found_s:
                        found_s = _tried_s(w, owner, rule, split, limits, found_s)
    for split in range(splits, least - 1, -1):
        if found_s == most_s and not h.is_1f1b:
            found_s = _tried_s(w, 0, BACKWARD_FIRST, split, ONE_EACH, found_s)
    return found_s


@compiled
def _is_over(w: Any, found_s: float, most_s: float) -> bool:
    """Return whether there is no time to try more, if something fits here or elsewhere."""
    h = header(w, WALK)
    is_late = header(pointer_at(h.orders, ORDERS), ORDERS).tasks > h.until_tasks
    return bool(is_late and min(found_s, most_s) < np.inf)


@compiled
def _chosen_s(w: Any, count: int, most_s: float) -> float:
    """Return the time of TRIED as it says; infinite if it takes longer than ``most_s``."""
    x = items(w, TRIED)
    owner = x[OWNER_CHOICE] = min(x[OWNER_CHOICE], count - 1)
    if least_time_s(w, pointer_at(header(w, WALK).rows, ROWS), owner) >= most_s:
        return np.inf
    return _as_told_s(x, w, owner, most_s)


@compiled
def _as_told_s(x: Any, w: Any, owner: int, most_s: float) -> float:
    return _scheduled_s(w, owner, x[RULE_CHOICE], x[SPLIT_CHOICE], x[LIMIT_CHOICE], most_s)


@compiled
def _usual_rule(w: Any) -> int:
    """Return the rule that is tried first."""
    h = header(w, WALK)
    if h.is_1f1b:
        return ONE_F_ONE_B
    numbers = header(pointer_at(h.rows, ROWS), ROWS)
    return RHYTHM if numbers.replicas > numbers.devices else BACKWARD_FIRST


@compiled
def _is_of_use(w: Any, rule: int, split: int) -> bool:
    """Return whether schedules by a rule may be better than others."""
    h = header(w, WALK)
    numbers = header(pointer_at(h.rows, ROWS), ROWS)
    if h.is_1f1b:
        return False
    if rule == RHYTHM:
        return numbers.replicas > numbers.devices
    if rule == ONE_F_ONE_B:
        return split == 0 and (h.blocks == 1 or numbers.replicas > numbers.devices)
    return True


@compiled
def _tried_s(w: Any, owner: int, rule: int, split: int, limits: int, found_s: float) -> float:
    """Return the time of a choice if it is the best so far, and keep it; else the best."""
    x, time_s = items(w, TRIED), _scheduled_s(w, owner, rule, split, limits, found_s)
    if time_s >= found_s:
        return found_s
    x[OWNER_CHOICE], x[RULE_CHOICE], x[SPLIT_CHOICE], x[LIMIT_CHOICE] = owner, rule, split, limits
    return time_s


@compiled
def _scheduled_s(
    w: Any, assignment: int, rule: int, split: int, limits: int, most_s: float
) -> float:
    """Return the time of the prepared layout by a choice; infinite if it does not fit memory.

    What takes longer than ``most_s`` is not made to fit.
    """
    h, owners = header(w, WALK), items(w, OWNERS)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    numbers, owner = header(rows, ROWS), items(schedule, OWNER)
    size = numbers.stages * numbers.microbatches
    for i in range(size):
        owner[i] = owners[assignment * size + i]
    if rule == ONE_F_ONE_B:
        return _fixed_s(w, most_s) if set_1f1b(items(w, MICROBATCH), rows, schedule) else np.inf
    splits, factor = split == 1, FACTORS[limits]
    if not set_limits_in_flight(rows, schedule, factor, splits, h.may_stay_whole == 1):
        return np.inf
    header(schedule, SCHEDULE).rule = rule
    if rule == RHYTHM:
        stretch = STRETCHES[limits & 1]
        set_rhythm(rows, schedule, pointer_at(h.wires, WIRES), stretch, splits)
    time_s = with_room_s(pointer_at(h.orders, ORDERS), most_s)
    if time_s == np.inf or not h.blocks or header(schedule, SCHEDULE).rule == FIXED:
        return time_s if time_s < np.inf and _fits(w) else np.inf
    _take_order(w)
    return _fixed_s(w, most_s)


@compiled
def _fixed_s(w: Any, most_s: float) -> float:
    """Return the time of the given order; infinite if it is longer, does not fit, or deadlocks."""
    return given_order_s(pointer_at(header(w, WALK).orders, ORDERS), most_s)


@compiled
def _fits(w: Any) -> bool:
    return fits(pointer_at(header(w, WALK).orders, ORDERS))


# --- equal pipelines ------------------------------------------------------------------------------


@compiled
def _prepared_pipeline(x: Any, w: Any) -> bool:
    """Gather the rows of the slowest of equal pipelines, without reductions."""
    if not _prepared(x, w):
        return False
    h, copies, owners = header(w, WALK), replicas_in(x, 0), items(w, OWNERS)
    pipeline = items(w, PIPELINE)
    _take_pipeline(items(w, WHOLE), _slowest(x, w, copies), pipeline)
    h.of_pipeline, h.copies, share = 1, copies, h.microbatches // copies
    h.share = share
    if call(h.prepare_at, w) == 0.0:
        return False
    for s in range(x[0]):
        for number in range(share):
            owners[s * share + number] = s
    return True


@compiled
def _pipelines_s(x: Any, w: Any) -> float:
    """Return the time of equal pipelines by a choice; the rows are those of one of them."""
    h = header(w, WALK)
    rows, schedule = pointer_at(h.rows, ROWS), pointer_at(h.schedule, SCHEDULE)
    if _as_told_s(x, w, 0, np.inf) == np.inf:
        return np.inf
    if header(schedule, SCHEDULE).rule != FIXED:
        _take_order(w)
    devices = keep_order(w, rows, schedule)
    if not _prepared(x, w):
        return np.inf
    spread_order(w, rows, schedule, devices, replicas_in(x, 0))
    return _fixed_s(w, np.inf)


@compiled
def _slowest(x: Any, w: Any, copies: int) -> int:
    """Return the number of the pipeline whose microbatches take longest."""
    slowest, most_s = 0, -1.0
    for copy in range(copies):
        work_s = 0.0
        for s in range(x[0]):
            work_s += items(w, EACH_S)[replica_of(x, s) + copy]
        if work_s > most_s:
            slowest, most_s = copy, work_s
    return slowest


@compiled
def _take_pipeline(x: Any, copy: int, target: Any) -> None:
    """Write the block of one of a block's pipelines."""
    copy_block(x, target)
    for s in range(x[0]):
        target[device_at(target, s)] = device_of(x, replica_of(x, s) + copy)
    for s in range(x[0] + 1):
        set_start(target, s, s)
    target[1] = x[0]
