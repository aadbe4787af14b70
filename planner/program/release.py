"""What tasks wait for: each is released by all that it waits for, and then starts or may start."""

from __future__ import annotations

from planner.program.choice import offer
from planner.program.compiled import compiled, header, items, row
from planner.program.memory import ceases_to_hold, starts_to_hold
from planner.program.network import request
from planner.program.program import COMPUTE, FLOW, LATE_FLOW, STEP, SUCCESSORS, TASKS
from planner.program.work import READY, STACK, STATES, WORK


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
        if release(p, w, successor, by, now):
            stack[3 * depth], stack[3 * depth + 1], stack[3 * depth + 2] = at, end, by
            depth += 1
            join = row(p, TASKS, successor)
            at, end, by = join.successor, join.successor_end, successor


@compiled
def release(p: int, w: int, n: int, by: int, now: float) -> bool:
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
        state = header(w, WORK)
        items(w, READY)[state.n_ready] = n
        state.n_ready += 1
    elif task.role == STEP:
        times.start_s = now
    else:
        times.start_s = times.end_s = now
        starts_to_hold(p, w, task.effect)
        ceases_to_hold(p, w, task.effect)
        return True
    return False
