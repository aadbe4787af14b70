"""Cuts with the shortest longest stage, for devices in an order: the starts of the walk, compiled.

Stages are chosen from the last to the first, so that it is known how many come after each and how
many microbatches it has in flight. The work of stages is counted by types of devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.costs.stage_table import CROSSING, TABLE, stage_figures
from planner.program.compiled import compiled, entry, header, items, pointer, pointer_at, row
from planner.search.walk.memory import (
    CAPACITY_BYTES,
    HOST_S,
    MAY_CUT,
    STAGE_FIGURES,
    TYPE_OF,
    WALK,
)


@entry
def stage_needs(memory: Any, seconds: Any, limits: Any) -> Any:
    """Work out what every interval of layers takes, with as much recomputation as it needs.

    Args:
        memory: header of the memory of a walk.
        seconds: stages x K x (N + 1) x (N + 1), infinite; of a forward and a backward of the last
            stage, of the one before it, …, written where an interval fits.
        limits: the same shape; the least limit on recomputed layers, written.
    """
    w = pointer(memory)
    h, may_cut = header(w, WALK), items(w, MAY_CUT)
    figures = row(w, STAGE_FIGURES, 0)
    for kind in range(seconds.shape[1]):
        room = 0
        for device in range(h.devices):
            if items(w, TYPE_OF)[device] == kind:
                room = items(w, CAPACITY_BYTES)[device]
        for begin in range(h.layers):
            for end in range(begin + 1, h.layers + 1):
                for count in range(len(seconds) if may_cut[begin] and may_cut[end] else 0):
                    limit = limits[count - 1, kind, begin, end] if count else 0
                    limit = _least_that_fits(w, kind, begin, end, count + 1, limit, room)
                    limits[count, kind, begin, end] = limit
                    if limit <= h.layers and figures.may_run == 1:
                        work_s = figures.B_s + figures.F_s + 2 * items(w, HOST_S)[0]
                        seconds[count, kind, begin, end] = work_s


@compiled
def _least_that_fits(
    w: Any, kind: Any, begin: Any, end: Any, flight: Any, least: Any, room: Any
) -> Any:
    """Return the least limit on recomputed layers that fits; more than all layers if none does."""
    layers = header(w, WALK).layers
    if least > layers or _fits(w, kind, begin, end, flight, least, room):
        return least
    if not header(w, WALK).may_rerun or not _fits(w, kind, begin, end, flight, layers, room):
        return layers + 1
    low, high = least, layers
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(w, kind, begin, end, flight, middle, room):
            high = middle
        else:
            low = middle
    _fits(w, kind, begin, end, flight, high, room)
    return high


@compiled
def _fits(w: Any, kind: Any, begin: Any, end: Any, flight: Any, limit: Any, room: Any) -> Any:
    h = header(w, WALK)
    figures, table = row(w, STAGE_FIGURES, 0), pointer_at(h.table, TABLE)
    stage_figures(table, kind, begin, end, limit, 0, h.problem_copies, figures)
    output = items(table, CROSSING)[kind * (h.layers + 1) + end]
    held = figures.static_bytes + figures.workspace_bytes + output
    return held + min(flight, h.microbatches) * figures.stash_bytes <= room


@entry
def cut_groups(seconds: Any, may_cut: Any, counts: Any, best: Any, cut: Any, ends: Any) -> Any:
    """Choose the cuts of stages whose devices are known.

    Args:
        seconds: of :func:`stage_needs`.
        may_cut: N + 1; whether stages may begin and end there.
        counts: S x K; devices of each type in each stage.
        best: (S + 1) x (N + 1), infinite; to work in.
        cut: the same shape; to work in.
        ends: S; the end of each stage, written.

    Returns:
        Seconds of the longest stage; infinite if none fits.
    """
    stages, layers = len(counts), seconds.shape[2] - 1
    best[stages, layers] = 0.0
    for s in range(stages - 1, -1, -1):
        for begin in range(layers):
            if not may_cut[begin]:
                continue
            for end in range(begin + 1, layers + 1):
                if best[s + 1, end] == np.inf or not may_cut[end]:
                    continue
                after = min(stages - s, len(seconds)) - 1
                longest = max(best[s + 1, end], _shared_s(seconds[after], counts[s], begin, end))
                if longest < best[s, begin]:
                    best[s, begin], cut[s, begin] = longest, end
    at = 0
    for s in range(stages):
        at = cut[s, at]
        ends[s] = at
    return best[0, 0]


@compiled
def _shared_s(seconds: Any, counts: Any, begin: Any, end: Any) -> Any:
    """Return the seconds of a microbatch more on replicas that share the work by their speed."""
    speed = 0.0
    for kind in range(len(counts)):
        if counts[kind]:
            each_s = seconds[kind, begin, end]
            if each_s == np.inf:
                return np.inf
            speed += counts[kind] / max(each_s, 1e-15)
    return 1 / speed


@entry
def cut_order(
    seconds: Any,
    may_cut: Any,
    before: Any,
    best: Any,
    chosen: Any,
    ends: Any,
    starts: Any,
    longest: Any,
) -> Any:
    """Choose cuts and replicas of stages that take units of devices in an order, for each number.

    Args:
        seconds: of :func:`stage_needs`.
        may_cut: N + 1; whether stages may begin and end there.
        before: (U + 1) x K; devices of each type in the units of the order before each.
        best: (most stages + 1) x (N + 1) x (U + 1), infinite; to work in.
        chosen: the same shape x 2; to work in.
        ends: most_stages x most_stages; the end of each stage of 1, 2, … stages, written.
        starts: the same shape; its first unit.
        longest: most_stages; seconds of the longest stage, infinite if none fits, written.
    """
    units, layers, kinds = len(before) - 1, seconds.shape[2] - 1, before.shape[1]
    best[0, layers, units] = 0.0
    for k in range(1, len(longest) + 1):
        table = seconds[min(k, len(seconds)) - 1]
        for begin in range(layers):
            if not may_cut[begin]:
                continue
            for end in range(begin + 1, layers + 1):
                if not may_cut[end]:
                    continue
                for first in range(units - k + 1):
                    for last in range(first + 1, units + 1):
                        rest = best[k - 1, end, last]
                        if rest >= best[k, begin, first]:
                            continue
                        speed = 0.0
                        for kind in range(kinds):
                            number = before[last, kind] - before[first, kind]
                            if number:
                                speed += number / max(table[kind, begin, end], 1e-15)
                        if _has_none(table, before, first, last, begin, end):
                            break
                        found = max(rest, 1 / speed)
                        if found < best[k, begin, first]:
                            best[k, begin, first] = found
                            chosen[k, begin, first, 0] = end
                            chosen[k, begin, first, 1] = last
        longest[k - 1] = best[k, 0, 0]
        layer, unit = 0, 0
        for s in range(k if longest[k - 1] < np.inf else 0):
            starts[k - 1, s] = unit
            layer, unit = chosen[k - s, layer, unit, 0], chosen[k - s, layer, unit, 1]
            ends[k - 1, s] = layer


@compiled
def _has_none(table: Any, before: Any, first: Any, last: Any, begin: Any, end: Any) -> Any:
    """Return whether some device of the units does not hold the layers."""
    for kind in range(before.shape[1]):
        if before[last, kind] > before[first, kind] and table[kind, begin, end] == np.inf:
            return True
    return False


@entry
def cut_by_classes(
    seconds: Any,
    may_cut: Any,
    kind_of: Any,
    counts: Any,
    best: Any,
    chosen: Any,
    ends: Any,
    classes: Any,
) -> Any:
    """Choose stages of one device each, of any devices in any order, with the shortest longest one.

    The state is how many devices of each class are in use, from the last stage on: exact, and quick
    where classes are few or devices are at most some twenty.

    Args:
        seconds: 1 x K x (N + 1) x (N + 1); of stages with one microbatch in flight.
        may_cut: as of :func:`cut_groups`.
        kind_of: the type of each class.
        counts: devices of each class.
        best: states x (N + 1), float32, infinite; to work in.
        chosen: the same shape x 2; to work in.
        ends: the end of each stage, written.
        classes: the class of its device, written.

    Returns:
        The number of stages; 0 if there are none that fit.
    """
    states, layers = len(best), seconds.shape[2] - 1
    best[0, layers] = 0.0
    at, longest = -1, np.inf
    for state in range(states):
        if best[state, 0] < longest:
            at, longest = state, best[state, 0]
        step = 1
        for c in range(len(counts)):
            if state // step % (counts[c] + 1) < counts[c]:
                _add_stage(seconds[0, kind_of[c]], may_cut, state, step, c, best, chosen)
            step *= counts[c] + 1
    if at < 0:
        return 0
    begin, count = 0, 0
    while begin < layers:
        c = chosen[at, begin, 0]
        ends[count], classes[count] = chosen[at, begin, 1], c
        step = 1
        for other in range(c):
            step *= counts[other] + 1
        begin, count, at = chosen[at, begin, 1], count + 1, at - step
    return count


@compiled
def _add_stage(
    seconds: Any, may_cut: Any, state: Any, step: Any, c: Any, best: Any, chosen: Any
) -> Any:
    """Put one stage more before those of a state, on a device of a class."""
    layers = best.shape[1] - 1
    for end in range(1, layers + 1):
        rest = best[state, end]
        if rest == np.inf:
            continue
        for begin in range(end - 1, -1, -1):
            found = max(rest, np.float32(seconds[begin, end]))
            if found == np.inf:
                break
            if may_cut[begin] and found < best[state + step, begin]:
                best[state + step, begin] = found
                chosen[state + step, begin, 0], chosen[state + step, begin, 1] = c, end
