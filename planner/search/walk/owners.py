"""Which replica of each stage runs each microbatch, as compiled code.

A balanced assignment gives a microbatch to the replica that would finish it first. Where links
between nodes are slow, a local one keeps it inside a node from stage to stage, and a following one
does so as far as replicas have as much to do as if balanced.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, items, pointer_at, row
from planner.program.lower.wires import (
    GB_PER_S,
    LATENCY_S,
    LINK_GB_PER_S,
    WIRES,
    pair_of,
    route_end,
    route_link,
)
from planner.program.stage_rows import (
    DEVICE,
    RECEIVED_BYTES,
    RECEIVED_S,
    REDUCTION,
    REDUCTION_DEVICE,
    REPLICA,
    ROWS,
    RULES,
    SECONDS,
    STAGE,
)
from planner.search.walk.memory import (
    CLASS_OF,
    COUNTS,
    DEVICE_OF,
    EACH_S,
    FINISH_S,
    FIRST,
    HOMES,
    ISLAND,
    ISLANDS,
    LINK_S,
    OWNERS,
    SHARE,
    SLOWEST_S,
    USED,
    WALK,
)

INSTANT_S = 1e-15
BY_DEVICE = RULES.index("device")
"""From this rule on gradients are reduced after all operations of a device."""


@compiled
def assign_all(w: Any, stages: int, replicas: int, microbatches: int) -> int:
    """Write the assignments that are worth trying; return how many there are."""
    h, island, size = header(w, WALK), items(w, ISLAND), stages * microbatches
    device, count = items(w, DEVICE_OF), 1
    for r in range(replicas):
        island[r] = 0
    _assign_within(w, 0, stages, microbatches, 1)
    if replicas == stages:
        return 1
    for place in range(h.places):
        most = 0
        for r in range(replicas):
            island[r] = items(w, ISLANDS)[place * h.devices + device[r]]
            most = max(most, island[r])
        _assign_within(w, count * size, stages, microbatches, most + 1)
        count += _is_new(w, count, size)
        _assign_following(w, count * size, stages, microbatches, most + 1)
        count += _is_new(w, count, size)
    groups = _number_equal_islands(w, stages, microbatches)
    if groups > 1:
        _assign_within(w, count * size, stages, microbatches, groups)
        count += _is_new(w, count, size)
    return count


@compiled
def _is_new(w: Any, count: int, size: int) -> int:
    """Return 1 if an assignment differs from those before it, else 0."""
    owners = items(w, OWNERS)
    for other in range(count):
        is_same = True
        for i in range(size):
            if owners[other * size + i] != owners[count * size + i]:
                is_same = False
                break
        if is_same:
            return 0
    return 1


@compiled
def _assign_within(w: Any, at: int, stages: int, microbatches: int, islands: int) -> None:
    """Give each microbatch an island, and at every stage to a replica there if there is one.

    An island's share is in proportion to the speed of its slowest stage; its replicas share as they
    would finish first.
    """
    first, each_s, island = items(w, FIRST), items(w, EACH_S), items(w, ISLAND)
    owners, finish_s, homes = items(w, OWNERS), items(w, FINISH_S), items(w, HOMES)
    _find_homes(w, stages, microbatches, islands)
    for s in range(stages):
        for r in range(first[s], first[s + 1]):
            finish_s[r] = each_s[r]
        for number in range(microbatches):
            best, any_best = -1, first[s]
            for r in range(first[s], first[s + 1]):
                if finish_s[r] < finish_s[any_best]:
                    any_best = r
                if island[r] == homes[number] and (best < 0 or finish_s[r] < finish_s[best]):
                    best = r
            best = any_best if best < 0 else best
            owners[at + s * microbatches + number] = best
            finish_s[best] += each_s[best]


@compiled
def _find_homes(w: Any, stages: int, microbatches: int, islands: int) -> None:
    """Find the island of each microbatch."""
    first, each_s, island = items(w, FIRST), items(w, EACH_S), items(w, ISLAND)
    slowest_s, speed, homes = items(w, SLOWEST_S), items(w, FINISH_S), items(w, HOMES)
    for i in range(islands):
        slowest_s[i] = 0.0
    for s in range(stages):
        for i in range(islands):
            speed[i] = 0.0
        for r in range(first[s], first[s + 1]):
            speed[island[r]] += 1 / max(each_s[r], INSTANT_S)
        for i in range(islands):
            if speed[i] > 0:
                slowest_s[i] = max(slowest_s[i], 1 / speed[i])
    finish_s = speed
    for i in range(islands):
        finish_s[i] = slowest_s[i]
    for number in range(microbatches):
        best = -1
        for i in range(islands):
            if slowest_s[i] > 0 and (best < 0 or finish_s[i] < finish_s[best]):
                best = i
        homes[number] = best
        finish_s[best] += slowest_s[best]


@compiled
def _assign_following(w: Any, at: int, stages: int, microbatches: int, islands: int) -> None:
    """Keep microbatches in their island as far as replicas have as much to do as if balanced.

    Where a stage has more of its speed in another island than the stage before, some move there,
    spread evenly over the microbatches.
    """
    first, each_s, island = items(w, FIRST), items(w, EACH_S), items(w, ISLAND)
    owners, finish_s, homes = items(w, OWNERS), items(w, FINISH_S), items(w, HOMES)
    share, used = items(w, SHARE), items(w, USED)
    for number in range(microbatches):
        homes[number] = island[owners[number]]
    for s in range(stages):
        for i in range(islands):
            share[i] = used[i] = 0
        for number in range(microbatches):
            share[island[owners[s * microbatches + number]]] += 1
        for r in range(first[s], first[s + 1]):
            finish_s[r] = each_s[r]
        for number in range(microbatches):
            home, part = homes[number], (number + 1) / microbatches
            if used[home] >= min(float(share[home]), share[home] * part + 1):
                home = _next_home(share, used, part, islands)
            used[home] += 1
            homes[number] = home
            best = -1
            for r in range(first[s], first[s + 1]):
                if island[r] == home and (best < 0 or finish_s[r] < finish_s[best]):
                    best = r
            owners[at + s * microbatches + number] = best
            finish_s[best] += each_s[best]


@compiled
def _next_home(share: Any, used: Any, part: float, islands: int) -> int:
    """Return the island that is furthest behind its share, of those that have some left."""
    best, best_open, best_due = -1, False, 0.0
    for i in range(islands):
        if share[i] == 0:
            continue
        is_open, due = used[i] < share[i], share[i] * part - used[i]
        if best < 0 or (is_open and not best_open) or (is_open == best_open and due > best_due):
            best, best_open, best_due = i, is_open, due
    return best


@compiled
def _number_equal_islands(w: Any, stages: int, microbatches: int) -> int:
    """Number the parts of the most equal groups that devices form; return how many there are.

    The n-th group has the n-th part of the devices of each class of every stage.
    """
    first, island = items(w, FIRST), items(w, ISLAND)
    groups = microbatches
    for s in range(stages):
        for r in range(first[s], first[s + 1]):
            groups = math.gcd(groups, _alike(w, s, r, first[s + 1]))
    for s in range(stages):
        for r in range(first[s], first[s + 1]):
            island[r] = _alike(w, s, r, r) // (_alike(w, s, r, first[s + 1]) // groups)
    return groups


@compiled
def _alike(w: Any, s: int, replica: int, end: int) -> int:
    """Return how many replicas of a stage before an end are of the class of one of them."""
    class_of, device, count = items(w, CLASS_OF), items(w, DEVICE_OF), 0
    for r in range(items(w, FIRST)[s], end):
        count += class_of[device[r]] == class_of[device[replica]]
    return count


@compiled
def least_time_s(w: Any, rows: Any, owner: Any) -> Any:
    """Return a lower bound: what the busiest replica or the busiest link does.

    A replica does its operations, the messages that block it, the reductions of its device and its
    step, between the ways to it and back from it; a link carries its messages.

    Args:
        w: pointer to the memory of the walk.
        rows: pointer to the rows of the stages.
        owner: number of an assignment.
    """
    numbers, seconds = header(rows, ROWS), items(rows, SECONDS)
    splits, busy_s, after_s = header(w, WALK).may_split, items(w, FINISH_S), items(w, SLOWEST_S)
    _find_busy_s(w, rows, owner)
    _find_after_s(w, rows)
    way_s = back_way_s = most_s = 0.0
    at_end = numbers.reduction_rule >= BY_DEVICE
    for s in range(numbers.stages):
        stage, forward_s, least_back_s = row(rows, STAGE, s), np.inf, np.inf
        for r in range(stage.first, stage.last):
            back_s = seconds[4 * r]
            if splits:
                back_s = min(back_s, seconds[4 * r + 2] + seconds[4 * r + 3])
            if items(w, COUNTS)[r]:
                all_s = items(w, COUNTS)[r] * (seconds[4 * r + 1] + back_s) + busy_s[r]
                device = row(rows, REPLICA, r).device
                # Buckets are reduced from the beginning of the last operation that makes them on.
                last_s = 0.0 if at_end else max(seconds[4 * r], seconds[4 * r + 3])
                step_s = row(rows, DEVICE, device).optimizer_s
                end_s = max(max(0.0, after_s[device] - last_s) + step_s, back_way_s)
                most_s = max(most_s, way_s + all_s + end_s)
            forward_s = min(forward_s, seconds[4 * r + 1])
            least_back_s = min(least_back_s, back_s)
        way_s += forward_s
        if not splits:  # Else the last operation may be a weight gradient, which has no way back.
            back_way_s += least_back_s
    return max(most_s, _busiest_link_s(w, rows, owner))


@compiled
def _find_busy_s(w: Any, rows: Any, owner: int) -> None:
    """Count the microbatches of each replica, and the seconds in which messages block it."""
    numbers, owners, counts = header(rows, ROWS), items(w, OWNERS), items(w, COUNTS)
    busy_s, first = items(w, FINISH_S), owner * numbers.stages * numbers.microbatches
    for r in range(numbers.replicas):
        counts[r], busy_s[r] = 0, 0.0
    # Messages of one exchange move at once, four at most, unless a device has one stream.
    share = 1.0 if numbers.one_stream or numbers.exchange == 0 else 0.25
    blocks = numbers.send_blocks == 1 and numbers.receive_blocks == 1
    for s in range(numbers.stages):
        for m in range(numbers.microbatches):
            at = first + s * numbers.microbatches + m
            counts[owners[at]] += 1
            if blocks and s > 0:
                before, here = owners[at - numbers.microbatches], owners[at]
                both_s = _message_s(w, rows, before, here, 1) + _message_s(w, rows, here, before, 0)
                busy_s[before] += share * both_s
                busy_s[here] += share * both_s


@compiled
def _busiest_link_s(w: Any, rows: Any, owner: int) -> float:
    """Return the seconds in which the link that messages fill most is full."""
    numbers, owners, load_s = header(rows, ROWS), items(w, OWNERS), items(w, LINK_S)
    links = header(pointer_at(header(w, WALK).wires, WIRES), WIRES).links
    for n in range(links):
        load_s[n] = 0.0
    first = owner * numbers.stages * numbers.microbatches
    for s in range(1, numbers.stages):
        for m in range(numbers.microbatches):
            at = first + s * numbers.microbatches + m
            before, here = owners[at - numbers.microbatches], owners[at]
            _load_links(w, rows, before, here, 1)
            _load_links(w, rows, here, before, 0)
    most_s = 0.0
    for n in range(links):
        most_s = max(most_s, load_s[n])
    return most_s


@compiled
def _load_links(w: Any, rows: Any, source: int, target: int, forward: int) -> None:
    """Add what a message takes of each link of its route."""
    bytes_, from_device, to_device = _message(rows, source, target, forward)
    if bytes_ > 0:
        wires, load_s = pointer_at(header(w, WALK).wires, WIRES), items(w, LINK_S)
        end = route_end(wires, from_device, to_device)
        for place in range(end):
            link = route_link(wires, from_device, to_device, place, end)
            if link >= 0:
                load_s[link] += bytes_ / (items(wires, LINK_GB_PER_S)[link] * 1e9)


@compiled
def _message_s(w: Any, rows: Any, source: int, target: int, forward: int) -> float:
    """Return the seconds of a message that has its links to itself."""
    bytes_, from_device, to_device = _message(rows, source, target, forward)
    if bytes_ == 0:
        return 0.0
    wires = pointer_at(header(w, WALK).wires, WIRES)
    pair = pair_of(wires, from_device, to_device)
    moving_s = bytes_ / (items(wires, GB_PER_S)[pair] * 1e9)
    more_s = items(rows, RECEIVED_S)[2 * target + forward]
    return float(items(wires, LATENCY_S)[pair] + moving_s + more_s)


@compiled
def _message(rows: Any, source: int, target: int, forward: int) -> Any:
    """Return the bytes of a message between replicas, 0 on one device, and its devices."""
    there = row(rows, REPLICA, target)
    from_device = row(rows, DEVICE, row(rows, REPLICA, source).device).number
    to_device = row(rows, DEVICE, there.device).number
    bytes_ = items(rows, RECEIVED_BYTES)[2 * there.stage + forward]
    return 0 if from_device == to_device else bytes_, from_device, to_device


@compiled
def _find_after_s(w: Any, rows: Any) -> None:
    """Add up the reductions of each device, which has one at a time."""
    numbers, after_s = header(rows, ROWS), items(w, SLOWEST_S)
    for place in range(numbers.devices):
        after_s[place] = 0.0
    for n in range(numbers.reductions):
        reduction = row(rows, REDUCTION, n)
        for at in range(reduction.first_device, reduction.last_device):
            after_s[items(rows, REDUCTION_DEVICE)[at]] += reduction.seconds
