"""Steps of the walk, compiled: change a layout at random, judge it, go on from it or stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, entry, header, items, pointer
from planner.search.orders.calls import call
from planner.search.orders.random import uniform
from planner.search.walk.block import copy_block, digest_of, with_choice
from planner.search.walk.freedoms import is_allowed
from planner.search.walk.judge import ONLY_BOUND
from planner.search.walk.memory import (
    BEST,
    BEST_CHOICE,
    CHOICE,
    HERE,
    HERE_CHOICE,
    KEYS,
    KNOWN_S,
    RANDOM,
    TRIED,
    TRIED_CHOICE,
    WALK,
)
from planner.search.walk.moves import change, change_choice

OTHER_RULE = 0.1
"""How often a layout is scheduled otherwise instead of changed."""
WALK_ON, JUDGE, BOUND = range(3)
"""What :func:`run_walk` does."""


@compiled
def _scored_s(w: Any, most_s: float) -> float:
    """Return the seconds of the layout tried; a walk does not judge one again."""
    h, keys, known_s, tried = (
        header(w, WALK),
        items(w, KEYS),
        items(w, KNOWN_S),
        items(w, TRIED),
    )
    digest = np.uint64(digest_of(tried))
    if not h.looks_closely:
        digest = np.uint64(with_choice(digest, items(w, TRIED_CHOICE)))
    at = np.int64(digest & np.uint64(h.keys_rows - 1))
    if keys[at] == digest and most_s < np.inf:
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
        for i in range(4):
            items(w, BEST_CHOICE)[i] = items(w, CHOICE)[i]
    return found_s


@compiled
def _walk_on(w: Any, heat: float, tasks: int) -> None:
    h, state = header(w, WALK), items(w, RANDOM)
    here, tried = items(w, HERE), items(w, TRIED)
    until = h.tasks + tasks
    while h.tasks < until:
        copy_block(here, tried)
        for i in range(4):
            items(w, TRIED_CHOICE)[i] = items(w, HERE_CHOICE)[i]
        h.tasks += 1  # a change is work too, where all neighbours are known
        if uniform(state) < OTHER_RULE:
            is_new = change_choice(w)
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
            for i in range(4):
                items(w, HERE_CHOICE)[i] = items(w, TRIED_CHOICE)[i]
            h.here_s = found_s


@entry
def run_walk(memory: Any, what: int, heat: float, tasks: int) -> float:
    """Walk on, or judge the layout TRIED, or bound its time.

    In a walk a slower neighbour is taken with the probability exp(-x / heat), where it takes 1 + x
    times as long (Kirkpatrick et al. 1983, "Optimization by simulated annealing").

    Args:
        memory: header of the memory of the walk.
        what: WALK_ON, JUDGE or BOUND.
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
        return _scored_s(w, header(w, WALK).most_s) if is_allowed(tried, w) else np.inf
    if what == BOUND:
        header(w, WALK).most_s = ONLY_BOUND
        return call(header(w, WALK).judge_at, w) if is_allowed(tried, w) else np.inf
    _walk_on(w, heat, tasks)
    return header(w, WALK).best_s
