"""Exchanges of runtimes whose messages block, where orders are given.

Between two operations a device has a row of exchanges. It posts the messages of one together, and
goes on once all of them have arrived; a message sets off when both ends have posted it. An end that
overlaps is in no exchange: the sender posts at the end of the operation that made the message, the
receiver before everything else. The end of an exchange is a join of its messages.
"""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.operations import B, F, I, W
from planner.program.lower.room import (
    MESSAGE_TASK,
    NEEDED_JOIN,
    OPERATION_TASK,
    SENT_JOIN,
    edge,
    new_task,
)
from planner.program.program import FLOW, JOIN, TASKS
from planner.program.schedule import FIXED, ORDER_CODES, ORDER_START, OWNER, SCHEDULE
from planner.program.stage_rows import REPLICA, ROWS

_SINGLE, _NEIGHBOUR, _TOGETHER, _PAIRS = range(4)


@compiled
def fill_exchanges(rows: Any, schedule: Any, program: Any, work: Any, n: int) -> int:
    """Fill in the exchanges of all devices, whose ends are tasks from n on; return what follows."""
    h, start = header(rows, ROWS), items(schedule, ORDER_START)
    blocks = h.send_blocks or h.receive_blocks
    if not blocks or header(schedule, SCHEDULE).rule != FIXED:
        return n
    sent_join, needed_join = items(work, SENT_JOIN), items(work, NEEDED_JOIN)
    message_task = items(work, MESSAGE_TASK)
    for place in range(2 * h.stages * h.microbatches):
        sent_join[place] = needed_join[place] = -1
    for device in range(h.devices):
        before, at, end = start[device], start[device], start[device + 1]
        while before < end:
            after = _block_end(rows, schedule, start[device], at, end) if at < end else end
            n = _fill_between(rows, schedule, program, work, before, at, after, n)
            before, at = at, after
    for place in range(2 * h.stages * h.microbatches):
        # Its sender goes on first.
        if sent_join[place] >= 0:
            edge(work, message_task[place], sent_join[place])
        if needed_join[place] >= 0:
            edge(work, message_task[place], needed_join[place])
    return n


@compiled
def _block_end(rows: Any, schedule: Any, begin: int, at: int, end: int) -> int:
    """Return the end of a block of operations between which there is no exchange."""
    h, codes = header(rows, ROWS), items(schedule, ORDER_CODES)
    if h.exchange != _PAIRS or at + 1 >= end:
        return at + 1
    count = h.microbatches
    stage, kind = codes[at] // (4 * count), codes[at] // count % 4
    other = codes[at + 1] // count % 4
    # A backward never waits for itself.
    needs_first = codes[at] % count == codes[at + 1] % count and stage < h.stages - 1
    if kind != F or (other != B and other != I) or needs_first:
        return at + 1
    # Where all forwards come before all backwards, there are no pairs.
    for place in range(begin, end - 1):
        if codes[place] // count % 4 != F and codes[place + 1] // count % 4 == F:
            return at + 2
    return at + 1


@compiled
def _fill_between(
    rows: Any, schedule: Any, program: Any, work: Any, before: int, at: int, after: int, n: int
) -> int:
    """Fill in the exchanges between the operations from before to at and those up to after."""
    codes, operation_task = items(schedule, ORDER_CODES), items(work, OPERATION_TASK)
    poster = operation_task[codes[at - 1]] if at > before else -1
    first = n
    if _is_at_once(rows, schedule, program, work, before, at, after):
        n = _exchange(rows, schedule, program, work, before, at, after, poster, n)
    else:
        n = _exchange(rows, schedule, program, work, before, at, at, poster, n)
        poster = n - 1 if n > first else poster
        n = _exchange(rows, schedule, program, work, at, at, after, poster, n)
    if n > first and after > at:
        edge(work, n - 1, operation_task[codes[at]])
    return n


@compiled
def _exchange(
    rows: Any,
    schedule: Any,
    program: Any,
    work: Any,
    before: int,
    at: int,
    after: int,
    poster: int,
    n: int,
) -> int:
    """Post what is sent and needed; the task n is the end of the exchange, if there is one."""
    message_task, is_empty = items(work, MESSAGE_TASK), True
    for place in range(before, after):
        message = _message(rows, schedule, program, work, place, place < at)
        if message < 0:
            continue
        is_empty = False
        if poster >= 0:
            edge(work, poster, message_task[message])
        joins = items(work, SENT_JOIN) if place < at else items(work, NEEDED_JOIN)
        joins[message] = n
    if is_empty:
        return n
    new_task(program, n, JOIN, -1)
    return n + 1


@compiled
def _message(rows: Any, schedule: Any, program: Any, work: Any, place: int, is_sent: bool) -> int:
    """Return the message that blocks an operation's device, after or before it; -1 for none."""
    h, code = header(rows, ROWS), items(schedule, ORDER_CODES)[place]
    count = h.microbatches
    stage, kind, m = code // (4 * count), code // count % 4, code % count
    if kind == W or not (h.send_blocks if is_sent else h.receive_blocks):
        return -1
    user, direction = stage, 1 if kind == F else 0
    if is_sent:
        user = stage + 1 if kind == F else stage - 1
    if user < 0 or user >= h.stages:
        return -1
    message = (user * 2 + direction) * count + m
    task = items(work, MESSAGE_TASK)[message]
    if task < 0 or row(program, TASKS, task).role != FLOW:
        return -1
    return int(message)


@compiled
def _is_at_once(
    rows: Any, schedule: Any, program: Any, work: Any, before: int, at: int, after: int
) -> bool:
    """Return whether all is exchanged at once that lies between some operations."""
    h, owner, other = header(rows, ROWS), items(schedule, OWNER), -1
    if h.exchange != _NEIGHBOUR:
        return bool(h.exchange in (_TOGETHER, _PAIRS))
    for place in range(before, after):
        message = _message(rows, schedule, program, work, place, place < at)
        if message >= 0:
            stage, m = message // (2 * h.microbatches), message % h.microbatches
            if place >= at:
                stage += -1 if message // h.microbatches % 2 == F else 1
            partner = row(rows, REPLICA, owner[stage * h.microbatches + m]).device
            if other >= 0 and partner != other:
                return False
            other = partner
    return other >= 0
