"""Steps of the walk, compiled: change a layout at random, judge it, go on from it or stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, entry, header, items, pointer, pointer_at
from planner.search.orders.calls import call
from planner.search.orders.memory import ORDERS
from planner.search.orders.random import uniform
from planner.search.walk.block import copy_block, digest_of
from planner.search.walk.freedoms import is_allowed
from planner.search.walk.judge import AS_TOLD, ONLY_BOUND
from planner.search.walk.memory import (
    BEST,
    HERE,
    KEYS,
    KNOWN_S,
    RANDOM,
    TRIED,
    WALK,
)
from planner.search.walk.moves import change, change_schedule

SCHEDULED_OTHERWISE = 0.1
"""How often how a layout is scheduled changes instead of its stages."""
WALK_ON, JUDGE, BOUND, SCHEDULE_AGAIN = range(4)
"""What :func:`run_walk` does."""


@compiled
def _scored_s(w: Any, most_s: float) -> float:
    """Return the seconds of the layout tried; a walk does not judge one again."""
    h, tried, keys, known_s = header(w, WALK), items(w, TRIED), items(w, KEYS), items(w, KNOWN_S)
    digest = digest_of(tried)
    at = np.int64(digest & np.uint64(h.keys_rows - 1))
    if keys[at] == digest:
        if known_s[at] > 0:
            return known_s[at]
        if most_s <= -known_s[at]:
            return np.inf
    h.most_s = most_s
    found_s = call(h.judge_at, w)
    # A negative number: it takes longer than so many seconds.
    keys[at], known_s[at] = digest, found_s if found_s < np.inf else -most_s
    if found_s < h.best_s:
        h.best_s = found_s
        copy_block(tried, items(w, BEST))
    return found_s


@compiled
def _walk_on(w: Any, heat: float, tasks: int) -> None:
    h, state = header(w, WALK), items(w, RANDOM)
    here, tried = items(w, HERE), items(w, TRIED)
    orders = header(pointer_at(h.orders, ORDERS), ORDERS)
    until = h.tasks + orders.tasks + tasks
    while h.tasks + orders.tasks < until:
        copy_block(here, tried)
        h.tasks += 1  # a change is work too, where all neighbours are known
        if uniform(state) < SCHEDULED_OTHERWISE:
            is_new = change_schedule(tried, w)
        else:
            is_new = change(tried, w)
            if is_new and uniform(state) < 0.1:
                is_new = change(tried, w)
        if not is_new:
            continue
        most_s = h.here_s * (1 - heat * np.log(max(1e-12, uniform(state))))
        found_s = _scored_s(w, most_s)
        if found_s <= most_s:
            copy_block(tried, here)
            h.here_s = found_s


@entry
def run_walk(memory: Any, what: int, heat: float, tasks: int) -> float:
    """Walk on, or judge, bound or schedule the layout TRIED.

    In a walk a slower neighbour is taken with the probability exp(-x / heat), where it takes 1 + x
    times as long (Kirkpatrick et al. 1983, "Optimization by simulated annealing").

    Args:
        memory: header of the memory of the walk.
        what: WALK_ON, JUDGE, BOUND or SCHEDULE_AGAIN: as it says, its order left in the schedule.
        heat: of the walk.
        tasks: number of tasks replayed and of changes after which the walk ends.

    Returns:
        Seconds of the best layout found, or of the one judged, or its lower bound; infinite if that
        is not allowed or fits no memory.
    """
    w = pointer(memory)
    tried = items(w, TRIED)
    header(w, WALK).looks_closely = what != WALK_ON
    if what == JUDGE:
        return call(header(w, WALK).judge_at, w) if is_allowed(tried, w) else np.inf
    if what == BOUND:
        header(w, WALK).most_s = ONLY_BOUND
        return call(header(w, WALK).judge_at, w) if is_allowed(tried, w) else np.inf
    if what == SCHEDULE_AGAIN:
        header(w, WALK).most_s = AS_TOLD
        return call(header(w, WALK).judge_at, w)
    _walk_on(w, heat, tasks)
    return header(w, WALK).best_s
