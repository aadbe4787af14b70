"""Given orders of operations, compiled: 1F1B, and the order that a replay came to."""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.program import DEVICES, TASKS
from planner.program.schedule import FIXED, ORDER_CODES, ORDER_START, OWNER, SCHEDULE
from planner.program.stage_rows import REPLICA, ROWS
from planner.program.work import RAN
from planner.search.orders.limits import flight_of

BACKWARD, FORWARD = 0, 1


@compiled
def take_order(rows: Any, schedule: Any, program: Any, work: Any) -> Any:
    """Make the order in which a replay ran the given one."""
    numbers, codes, start = (
        header(rows, ROWS),
        items(schedule, ORDER_CODES),
        items(schedule, ORDER_START),
    )
    at = 0
    for place in range(numbers.devices):
        start[place] = at
        device = row(program, DEVICES, place)
        for i in range(device.order, device.order_end):
            task = row(program, TASKS, items(work, RAN)[i])
            codes[at] = (task.stage * 4 + task.kind) * numbers.microbatches + task.microbatch
            at += 1
    start[numbers.devices] = at
    header(schedule, SCHEDULE).rule = FIXED


@compiled
def set_1f1b(microbatches: Any, rows: Any, schedule: Any) -> Any:
    """Give every device the order of 1F1B, or interleaved 1F1B where it holds several stages.

    The latter goes round the devices (Narayanan et al. 2021, section 2.2) and is defined without
    replicas; with replicas, each runs its own microbatches and as many of them ahead as 1F1B has in
    flight.

    Args:
        microbatches: room for the numbers of all microbatches.
        rows: pointer to the rows of the stages.
        schedule: pointer to the schedule with its owners; orders are written.

    Returns:
        Whether the order is defined for these stages.
    """
    numbers = header(rows, ROWS)
    ranks = numbers.devices
    rounds = numbers.replicas // ranks
    if numbers.replicas % ranks or (rounds > 1 and not _goes_round(rows)):
        return False
    if rounds > 1 and numbers.microbatches % ranks:
        return False
    header(schedule, SCHEDULE).rule = FIXED
    start = items(schedule, ORDER_START)
    start[0] = 0
    for place in range(ranks):
        stage = row(rows, REPLICA, place).stage
        count = _owned(rows, schedule, stage, place, microbatches)
        size, ahead = max(1, count), flight_of(rows, stage) - 1
        if rounds > 1:
            size, ahead = ranks, 2 * (ranks - 1 - place) + (rounds - 1) * ranks
        start[place + 1] = _in_turn(
            rows, schedule, place, rounds, microbatches, count, size, ahead, start[place]
        )
    return True


@compiled
def _goes_round(rows: Any) -> Any:
    """Return whether there are no replicas, and stage s is on device s mod D."""
    numbers = header(rows, ROWS)
    if numbers.replicas != numbers.stages:
        return False
    for s in range(numbers.stages):
        if row(rows, REPLICA, s).device != s % numbers.devices:
            return False
    return True


@compiled
def _owned(rows: Any, schedule: Any, stage: Any, replica: Any, microbatches: Any) -> Any:
    """List the microbatches of a replica; return how many there are."""
    total, count = header(rows, ROWS).microbatches, 0
    for m in range(total):
        if items(schedule, OWNER)[stage * total + m] == replica:
            microbatches[count] = m
            count += 1
    return count


@compiled
def _in_turn(
    rows: Any,
    schedule: Any,
    place: Any,
    rounds: Any,
    microbatches: Any,
    count: Any,
    size: Any,
    ahead: Any,
    at: Any,
) -> Any:
    """Write so many forwards, then a forward and a whole backward in turn, then the rest."""
    total, ranks = header(rows, ROWS).microbatches, header(rows, ROWS).devices
    codes = items(schedule, ORDER_CODES)
    first = row(rows, REPLICA, place).stage
    operations = rounds * count
    ahead = min(ahead, operations)
    for n in range(operations + ahead):
        if n < operations:
            _write(codes, at, first, ranks, rounds, microbatches, size, n, FORWARD, total)
            at += 1
        if n >= ahead:
            _write(codes, at, first, ranks, rounds, microbatches, size, n - ahead, BACKWARD, total)
            at += 1
    return at


@compiled
def _write(
    codes: Any,
    at: Any,
    first: Any,
    ranks: Any,
    rounds: Any,
    microbatches: Any,
    size: Any,
    n: Any,
    kind: Any,
    total: Any,
) -> Any:
    """Write the n-th forward or backward of a device."""
    turn, rest = n // (size * rounds), n % (size * rounds)
    number = rest // size
    if kind == BACKWARD:
        number = rounds - 1 - number
    stage = first + number * ranks
    codes[at] = (stage * 4 + kind) * total + microbatches[turn * size + rest % size]
