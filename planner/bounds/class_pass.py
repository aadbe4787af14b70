"""Whether any sequence of stages keeps a time: one compiled pass over cuts and devices in use.

The least value of a state is what has to pass before the next stage's first forward and after its
last gradient, together. A stage keeps the time if its replicas, each of which can run only so many
microbatches in what is left, together run all of them. docs/proofs.md has the rules.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.bounds.class_tables import ClassArrays
from planner.bounds.layers import FAR, BoolArray, FloatArray, IntArray
from planner.program.compiled import compiled, entry

NUMBERS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
"""Microbatches that are counted, the first or the last ones; others count as the next lower."""


@compiled
def times_within(spare_s: float, each_s: float) -> float:
    """Return how many times something fits into a time; any number if it takes nothing."""
    if each_s > 0:
        return float(np.floor(spare_s / each_s))
    return np.inf if spare_s >= 0 else -1.0


@compiled
def round_trips(
    spare_s: float,
    forward_s: float,
    back_s: float,
    ahead_s: float,
    before_s: float,
    behind_s: float,
) -> float:
    """Return how many microbatches a device can run in a time, at most.

    All forwards, backwards and waits for messages follow each other, but for the message into the
    first forward and that of the last backward. No backward is before the first microbatch's
    return, and the last forward is not after the last departure.

    Args:
        spare_s: from the device's first forward to the end of its last backward.
        forward_s: of a microbatch.
        back_s: of a microbatch.
        ahead_s: the least way of a microbatch behind the device and back to it.
        before_s: waits for a microbatch's messages at the cut before the stage.
        behind_s: the same at the cut behind it.
    """
    most = times_within(spare_s + before_s, forward_s + back_s + before_s + behind_s)
    most = min(most, times_within(spare_s - forward_s - ahead_s, back_s))
    return min(most, times_within(spare_s - back_s - ahead_s, forward_s))


@compiled
def _place(number: int) -> int:
    """Return the place of the largest of NUMBERS that is no larger than a number."""
    return int(np.searchsorted(NUMBERS, number, side="right")) - 1


@compiled
def number_passed(come_s: FloatArray, each_s: float, replicas: int, passed_s: FloatArray) -> None:
    """Write when the first microbatches have passed a stage, at the earliest.

    Of the first k that have, all but j - 1 came with number j or later, and some replica ran as
    many of these as an even share, one after the other. For three j of each k.

    Args:
        come_s: when they come to it, by place in NUMBERS.
        each_s: a microbatch on the fastest replica.
        replicas: of the stage.
        passed_s: by place, what is written.
    """
    for place in range(len(come_s)):
        passed_s[place] = come_s[place] + each_s
        if place:
            for before in (0, place // 2):
                rounds = 1 + (NUMBERS[place] - NUMBERS[before]) // replicas
                passed_s[place] = max(passed_s[place], come_s[before] + rounds * each_s)


@compiled
def _around(come_s: FloatArray, follow_s: FloatArray, around_s: FloatArray) -> None:
    """Write what passes before one of some replicas begins and after it has ended, at least.

    Of m replicas, one is number m or later to begin, one number m or later from the end to end, and
    one is number (m + 1) / 2, rounded down, or later in both.
    """
    for place in range(len(come_s)):
        most = max(come_s[place] + follow_s[0], come_s[0] + follow_s[place])
        middle = _place((NUMBERS[place] + 1) // 2)
        around_s[place] = max(most, come_s[middle] + follow_s[middle])


@compiled
def _most_in_flight(
    each: tuple[float, float, float, float, float, float],
    count: int,
    spare_s: float,
    way_spare_s: float,
    both_ways: bool,
    in_flight: int,
) -> float:
    """Return how many microbatches a device can run with no more of them in flight.

    Args:
        each: of a microbatch: forward, gradient on its way, backward, the least way behind the
            device and back to it, and waits for messages before and behind the stage.
        count: of all microbatches.
        spare_s: from the device's first forward to the end of its last backward.
        way_spare_s: from its first forward to its last gradient on the way.
        both_ways: whether gradients on their way count too.
        in_flight: at most.
    """
    forward, gradient, backward, ahead, before, behind = each
    most = min(float(count), round_trips(spare_s, forward, backward, ahead, before, behind))
    last_s = spare_s
    if both_ways:
        most = min(most, round_trips(way_spare_s, forward, gradient, ahead, before, behind))
        last_s = way_spare_s
    if in_flight < count:
        # One after the other in as many rows as are in flight, each for a round trip.
        rows = times_within(last_s, forward + ahead + gradient)
        most = min(most, in_flight * min(rows, float(count)))
    return max(most, 0.0)


@compiled
def _runs(
    row: FloatArray,
    count: int,
    limit_s: float,
    both_ways: bool,
    stage: tuple[float, float, float],
    come_s: float,
    around_s: float,
) -> float:
    """Return how many microbatches a replica can run.

    Args:
        row: (9) of its class: replicas, microbatches whose messages fit a device's links, what
            follows a last backward, and of a microbatch forward, gradient on its way, backward, the
            least way behind the stage and back, and waits before and behind the stage.
        count: of all microbatches.
        limit_s: to keep.
        both_ways: whether gradients on their way count too.
        stage: what passes before its first operation and after its last that counts; before its
            first; after its last gradient on the way.
        come_s: before the first operation of this replica.
        around_s: before that and after its last gradient.
    """
    arrival, first, after_gradient = stage
    before, spent = max(first, come_s), max(arrival, around_s)
    if both_ways:
        spent = max(spent, before + after_gradient)
    else:
        before = max(before, spent)
    each = (row[3], row[4], row[5], row[6], row[7], row[8])
    spare = limit_s - before - row[2]
    most = _most_in_flight(each, count, spare, limit_s - spent, both_ways, count)
    return float(min(most, row[1]))


@compiled
def _run(
    rows: FloatArray,
    count: int,
    limit_s: float,
    both_ways: bool,
    stage: tuple[float, float, float],
    come_s: FloatArray,
    around_s: FloatArray,
) -> float:
    """Return how many microbatches the replicas of a stage can run together, one after the other.

    Args:
        rows: (C, 9) of each class, see :func:`_runs`.
        count: of all microbatches.
        limit_s: to keep.
        both_ways: whether gradients on their way count too.
        stage: as in :func:`_runs`.
        come_s: before the first operations of its replicas, by place in NUMBERS.
        around_s: before these and after their last gradients.
    """
    total = 0.0
    for row in rows:
        for place in range(len(come_s)):
            # Replicas whose number is at least this one and below the next.
            number = row[0] - NUMBERS[place] + 1
            if number <= 0:
                break
            if place + 1 < len(come_s):
                number = min(number, float(NUMBERS[place + 1] - NUMBERS[place]))
            come, around = come_s[place], around_s[place]
            total += number * _runs(row, count, limit_s, both_ways, stage, come, around)
        if total >= count:
            break
    return total


@compiled
def _run_numbered(
    rows: FloatArray,
    count: int,
    limit_s: float,
    both_ways: bool,
    stage: tuple[float, float, float],
    come_s: FloatArray,
    follow_s: FloatArray,
) -> float:
    """Return the same for replicas of several classes, numbered together.

    Of all replicas one begins first, one second and so on; which class has which number is chosen
    so that together they run most: a program over how many of each class have a number so far.

    Args:
        rows: (C, 9) of each class, see :func:`_runs`.
        count: of all microbatches.
        limit_s: to keep.
        both_ways: whether gradients on their way count too.
        stage: as in :func:`_runs`.
        come_s: before the first operations of the replicas, by place in NUMBERS; one for all.
        follow_s: after their last gradients, by place in NUMBERS; one for all.
    """
    size = 1
    for row in rows:
        size *= int(row[0]) + 1
    most = np.full(size, -1.0)
    most[0] = 0.0
    for state in range(size):
        rest, number = state, 1
        for row in rows:
            number += rest % (int(row[0]) + 1)
            rest //= int(row[0]) + 1
        place = _place(number)
        come = come_s[min(place, len(come_s) - 1)]
        around = come + follow_s[min(place, len(follow_s) - 1)]
        rest, stride = state, 1
        for row in rows:
            held = int(row[0])
            if rest % (held + 1) < held:
                run = _runs(row, count, limit_s, both_ways, stage, come, around)
                most[state + stride] = max(most[state + stride], most[state] + run)
            rest //= held + 1
            stride *= held + 1
    return float(most[size - 1])


@compiled
def _run_in_memory(
    d: ClassArrays,
    rows: FloatArray,
    o: int,
    cut: int,
    end: int,
    limit_s: float,
    both_ways: bool,
    stage: tuple[float, float],
    end_s: float,
) -> float:
    """Return the same with what memory takes, for replicas that begin and end at once.

    Each replica runs what the best of its levels allows.

    Args:
        d: of the problem.
        rows: as in :func:`_run`.
        o: the stage's devices.
        cut: before the stage.
        end: the cut behind it.
        limit_s: to keep.
        both_ways: whether gradients on their way count too.
        stage: what passes before its first operation and after its last that counts; before its
            first.
        end_s: all-reduces with other stages and the optimizer step.
    """
    spent, before = stage
    if both_ways:
        spent = max(spent, before + d.after_gradient_s[1, o, cut, end] + end_s)
    total = 0.0
    for c in range(len(rows)):
        k, row = d.kind[c], rows[c]
        spare = limit_s - before - end_s - d.after_backward_s[1, k, o, cut, end]
        levels = int((d.in_flight[k] > 0).sum())
        most = 0.0 if levels else float(d.microbatches)
        for level in range(levels):
            again = d.again_s[k, level, cut, end]
            # A level on which as much runs again as on the next one is no better than that.
            is_next_better = level + 1 < levels and again >= d.again_s[k, level + 1, cut, end]
            if again < np.inf and not is_next_better:
                each = (row[3], row[4] + again, row[5] + again, row[6], row[7], row[8])
                most_s, at_once = limit_s - spent, d.in_flight[k, level]
                run = _most_in_flight(each, d.microbatches, spare, most_s, both_ways, at_once)
                most = max(most, run)
        total += row[0] * most
    return total


class StageWork(NamedTuple):
    """Room to work in, by place in NUMBERS where nothing else is said.

    Attributes:
        come: when the first microbatches come to a stage.
        follow: what follows before the last gradients begin there, seen from the end.
        last: what follows the last gradients on its replicas.
        around: both together, of the same replica.
        passed: when the first microbatches have passed it.
        rows: (C, 9) of :func:`_run`.
    """

    come: FloatArray
    follow: FloatArray
    last: FloatArray
    around: FloatArray
    passed: FloatArray
    rows: FloatArray


@compiled
def room_to_work(classes: int, columns: int) -> StageWork:
    """Return room to work in."""
    table = np.zeros((5, columns))
    rows = np.zeros((classes, 9))
    return StageWork(table[0], table[1], table[2], table[3], table[4], rows)


@compiled
def fastest(d: ClassArrays, o: int, cut: int, end: int) -> tuple[float, float]:
    """Return a microbatch's forward and gradient on the fastest type that a stage has."""
    forward, gradient = np.inf, np.inf
    for k in range(len(d.forward_s)):
        if d.has_type[o, k]:
            forward = min(forward, d.forward_s[k, end] - d.forward_s[k, cut])
            gradient = min(gradient, d.gradient_s[k, end] - d.gradient_s[k, cut])
    return forward, gradient


@compiled
def stage_spent_s(
    d: ClassArrays,
    work: StageWork,
    o: int,
    cut: int,
    end: int,
    most_s: float,
    limit_s: float,
    both_ways: bool,
    reached: tuple[float, float, float],
    joint_s: float,
) -> float:
    """Return what passes before and after a stage's first microbatch; infinity if it keeps no time.

    Args:
        d: of the problem.
        work: with ``come`` and ``follow``; what follows the last gradients is written to ``last``.
        o: the stage's devices.
        cut: before the stage.
        end: the cut behind it.
        most_s: what it may return at most.
        limit_s: to keep.
        both_ways: whether gradients on their way count.
        reached: what passes before its first operation and after its last that counts; the same
            without the messages at the cut; and what passes before its first operation.
        joint_s: all-reduces together with other stages.
    """
    arrival, left, first = reached
    count, rows = d.microbatches, work.rows
    end_s = joint_s + d.step_s[o, cut, end]
    after_gradient = d.after_gradient_s[0, o, cut, end] + end_s
    spent = max(arrival, first + after_gradient) if both_ways else arrival
    if spent > most_s:
        return np.inf
    for c in range(len(rows)):
        k = d.kind[c]
        rows[c, 0] = d.held[o, c]
        rows[c, 1] = times_within(limit_s - left, d.port_s[c, cut, end])
        rows[c, 2] = d.after_backward_s[0, k, o, cut, end] + end_s
        rows[c, 3] = d.forward_s[k, end] - d.forward_s[k, cut]
        rows[c, 4] = d.gradient_s[k, end] - d.gradient_s[k, cut]
        rows[c, 5] = d.backward_s[k, end] - d.backward_s[k, cut]
        rows[c, 6] = d.ahead_s[o, end]
        rows[c, 7], rows[c, 8] = d.waits_s[0, c, cut], d.waits_s[1, c, end]
    stage = (arrival, first, after_gradient)
    if d.is_tight[o, cut, end]:
        around = (arrival, first)
        run = _run_in_memory(d, rows, o, cut, end, limit_s, both_ways, around, end_s)
        if run < count:
            return np.inf
    for place in range(len(work.come)):
        work.last[place] = max(work.follow[place], after_gradient) if both_ways else 0.0
    _around(work.come, work.last, work.around)
    if _run(rows, count, limit_s, both_ways, stage, work.come, work.around) < count:
        return np.inf
    if (rows[:, 0] > 0).sum() > 1:
        come, last = work.come[:1], work.last[:1]
        if _run_numbered(rows, count, limit_s, both_ways, stage, work.come, last) < count:
            return np.inf
        if _run_numbered(rows, count, limit_s, both_ways, stage, come, work.last) < count:
            return np.inf
    return spent


class Apart(NamedTuple):
    """Since the last stage on one of two classes alone.

    Attributes:
        value_s: what passed before the next stage's first forward and after its last gradient.
        sent, returned: bytes of an activation and of a gradient, the least of all cuts since.
    """

    value_s: float
    sent: float
    returned: float


@compiled
def apart_at(d: ClassArrays, cut: int, before: int, value_s: float, since: Apart) -> Apart:
    """Return the same at a cut.

    Args:
        d: of the problem.
        cut: behind the stage before.
        before: that stage's pair.
        value_s: of that stage.
        since: of that stage, if it is on two classes.
    """
    if not d.is_mixed[before]:
        return Apart(value_s, d.sent_bytes[cut], d.returned_bytes[cut])
    sent, returned = min(since.sent, d.sent_bytes[cut]), min(since.returned, d.returned_bytes[cut])
    return Apart(since.value_s, sent, returned)


@compiled
def crossed_s(d: ClassArrays, cut: int, source: int, target: int, since: Apart) -> float:
    """Return what it takes that all microbatches change the class, with what passed around it.

    The last one that changes goes on to the end, and its gradient changes back.

    Args:
        d: of the problem.
        cut: the last one at which they may change.
        source: the class that they come from.
        target: the class that they go to.
        since: they were on the first class.
    """
    sent, returned = since.sent, since.returned
    there, back = 0.0, 0.0
    if sent > 0:
        there = d.crossing[1, source, target] + sent * d.crossing[2, source, target]
    if returned > 0:
        back = d.crossing[1, target, source] + returned * d.crossing[2, target, source]
    all_there = d.microbatches * sent * d.crossing[0, source, target]
    all_back = d.microbatches * returned * d.crossing[0, target, source]
    most = max(all_there + back, all_back + there)
    return float(since.value_s + min(most + d.way_s[cut], FAR))


@entry
def refutes(
    d: ClassArrays,
    fits: BoolArray,
    joint_s: FloatArray,
    columns: int,
    limit_s: float,
    both_ways: bool,
) -> tuple[IntArray, int]:
    """Return a likely sequence of stages if some may keep a time, and how many were looked at.

    The sequence has the pair and the end of each stage and is the one whose last label was least; a
    label has the least of each of its figures, so that the sequence itself need not keep the time.
    It is empty if none keeps it.

    Args:
        d: of the problem.
        fits: (O, N + 1, N + 1) whether a stage may lie there, in the case that is looked at.
        joint_s: (O, N + 1, N + 1) all-reduces together with other stages in that case.
        columns: how many of NUMBERS count.
        limit_s: to keep.
        both_ways: whether a pass counts forwards and gradients with the way home of the last one,
            or else all work of each stage and no way home.
    """
    cuts, pairs = len(d.there_s), len(d.used)
    ways = 1 if both_ways else 0
    table = np.full((cuts, pairs), np.inf)
    past = np.full((cuts, pairs, columns), np.inf)
    home = np.full((cuts, pairs, columns), np.inf)
    # Of a stage on two classes, the fields of Apart.
    since = np.full((3, cuts, pairs), np.inf)
    work = room_to_work(d.held.shape[1], columns)
    come, follow = work.come, work.follow
    came = np.full((cuts, pairs, 2), -1)
    looked = 0
    for cut in range(cuts - 1):
        for pair in range(pairs):
            u, o = d.used[pair], d.option[pair]
            if d.begins[pair] != (cut == 0):
                continue
            apart = Apart(np.inf, np.inf, np.inf)
            arrival, left, nearest = np.inf, np.inf, -1
            come[:] = np.inf
            follow[:] = np.inf if both_ways else 0.0
            if cut == 0:
                arrival, left = 0.0, 0.0
                come[:] = 0.0
                follow[:] = 0.0
            for way in range(d.way_begin[pair], d.way_begin[pair + 1]):
                before, between = d.way_before[way], d.way_between[way]
                value = table[cut, before]
                if value + d.busy_s[cut, between] > limit_s:
                    continue
                known = Apart(since[0, cut, before], since[1, cut, before], since[2, cut, before])
                known = apart_at(d, cut, before, value, known)
                sides = d.side[before], d.side[pair]
                if d.way_crosses[way] and crossed_s(d, cut, *sides, known) > limit_s:
                    continue
                apart = Apart(
                    min(apart.value_s, known.value_s),
                    min(apart.sent, known.sent),
                    min(apart.returned, known.returned),
                )
                there, back = d.there_s[cut, between], d.back_s[cut, between]
                if value + there + ways * back < arrival:
                    arrival, nearest = value + there + ways * back, before
                left = min(left, value)
                for place in range(columns):
                    come[place] = min(come[place], past[cut, before, place] + there)
                    if both_ways:
                        follow[place] = min(follow[place], home[cut, before, place] + back)
            if arrival + d.rest_s[ways, u, cut] > limit_s:
                continue
            first = d.head_s[o, cut] if both_ways else arrival
            for end in range(cut + 1, cuts):
                forward, gradient = fastest(d, o, cut, end)
                path = forward + ways * gradient
                if arrival + path > limit_s:
                    break
                rest = d.rest_s[ways, d.after[pair], end]
                if not fits[o, cut, end] or arrival + path + rest > limit_s:
                    continue
                looked += 1
                spent = (arrival, left, first)
                joint = joint_s[o, cut, end]
                value = path + stage_spent_s(
                    d, work, o, cut, end, limit_s - path - rest, limit_s, both_ways, spent, joint
                )
                if value > limit_s:
                    continue
                if value < table[end, pair]:
                    table[end, pair] = value
                    came[end, pair, 0], came[end, pair, 1] = cut, nearest
                for n, least in enumerate(apart):
                    since[n, end, pair] = min(since[n, end, pair], least)
                replicas = d.held[o].sum()
                number_passed(work.come, forward, replicas, work.passed)
                for place in range(columns):
                    past[end, pair, place] = min(past[end, pair, place], work.passed[place])
                if both_ways:
                    number_passed(work.last, gradient, replicas, work.passed)
                    for place in range(columns):
                        home[end, pair, place] = min(home[end, pair, place], work.passed[place])
    if table[cuts - 1].min() > limit_s:
        return came[:0, 0], looked
    return _sequence(came, int(table[cuts - 1].argmin())), looked


@compiled
def _sequence(came: IntArray, pair: int) -> IntArray:
    """Return pair and end of each stage that led to a pair at the last cut.

    Args:
        came: (N + 1, P, 2) of each state, the cut and the pair before.
        pair: of the last stage.
    """
    path, stages, end = np.zeros((len(came), 2), dtype=np.int64), 0, len(came) - 1
    while end:
        path[stages, 0], path[stages, 1] = pair, end
        end, pair = came[end, pair]
        stages += 1
    return path[:stages][::-1]
