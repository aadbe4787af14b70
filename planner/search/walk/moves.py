"""Random changes of a layout's stages, as compiled code on blocks.

Each change makes an unlike plan that is near: a boundary moves, devices move or change places, come
in or go out, stages merge or divide, a stage comes back to the devices of another, a memory point
changes. What came out is then tested against the freedoms (:func:`is_allowed`).
"""

from __future__ import annotations

from typing import Any

from planner.costs.stage_table import OFFLOAD_RANK, RERUN_RANK, TABLE
from planner.program.compiled import compiled, header, items, pointer_at
from planner.program.schedule import BACKWARD_FIRST
from planner.search.orders.lists import ONE_F_ONE_B
from planner.search.orders.random import below, uniform
from planner.search.walk.block import (
    AUTOMATIC,
    LIMIT_CHOICE,
    OWNER_CHOICE,
    RULE_CHOICE,
    SPLIT_CHOICE,
    begin_of,
    device_at,
    device_of,
    end_of,
    insert_device,
    insert_stage,
    offload_of,
    remove_replica,
    remove_stage,
    replica_of,
    replicas_in,
    rerun_of,
    set_end,
    set_limits,
    set_start,
    tidy,
)
from planner.search.walk.freedoms import is_allowed
from planner.search.walk.memory import (
    CLASS_OF,
    HELD,
    MOST_OWNERS,
    PLACE_OF,
    RANDOM,
    WALK,
)

KINDS_OF_CHANGE, LIMITS = 12, 4


@compiled
def change(x: Any, w: Any) -> Any:
    """Change a block at random; return whether what came out is allowed.

    Args:
        x: the block.
        w: pointer to the memory of the walk.
    """
    h, state = header(w, WALK), items(w, RANDOM)
    kind = below(state, KINDS_OF_CHANGE)
    if kind <= 2:
        is_changed = _move_boundaries(x, state)
    elif kind <= 4:
        is_changed = _move_device(x, w)
    elif kind == 5:
        is_changed = _swap_devices(x, state)
    elif kind == 6:
        is_changed = _rename_device(x, w)
    elif kind == 7:
        is_changed = _swap_stages(x, w)
    elif kind == 8:
        is_changed = _merge(x, w)
    elif kind == 9:
        is_changed = _divide(x, w)
    elif kind == 10:
        is_changed = _move_group(x, w)
    elif (h.may_rerun or h.may_offload) and uniform(state) < 0.5:
        is_changed = _change_limits(x, w)
    else:
        is_changed = _come_back(x, w)
    if not is_changed:
        return False
    if not h.least_equal:
        tidy(x)
    return is_allowed(x, w)


@compiled
def change_schedule(x: Any, w: Any) -> Any:
    """Change how a block is scheduled, at random; return whether that may be of use."""
    h, state = header(w, WALK), items(w, RANDOM)
    what = below(state, 3)
    if what == 0:
        x[OWNER_CHOICE] = below(state, MOST_OWNERS)
    elif what == 1:
        x[LIMIT_CHOICE] = below(state, LIMITS)
    else:
        x[RULE_CHOICE] = BACKWARD_FIRST + below(state, ONE_F_ONE_B - BACKWARD_FIRST + 1)
        if h.may_split and h.may_stay_whole:
            x[SPLIT_CHOICE] = below(state, 2)
    return not h.is_1f1b and (x[RULE_CHOICE] != ONE_F_ONE_B or x[SPLIT_CHOICE] == 0)


@compiled
def _move_boundaries(x: Any, state: Any) -> Any:
    """Move the boundary behind a stage, or those of several stages in a row, by a few layers."""
    if x[0] < 2:
        return False
    first = below(state, x[0] - 1)
    last = first
    if uniform(state) < 0.25:
        last = first + below(state, x[0] - 1 - first)
    by = 1
    while uniform(state) < 0.25:
        by += 1
    if uniform(state) < 0.5:
        by = -by
    for s in range(first, last + 1):
        set_end(x, s, end_of(x, s) + by)
    return True


@compiled
def _move_device(x: Any, w: Any) -> Any:
    """Move a replica to another stage, out of the plan or into it; perhaps a boundary with it."""
    h, state = header(w, WALK), items(w, RANDOM)
    if not h.replicates:
        return False
    target, source = below(state, x[0]), -1
    device = _unused_device(x, w) if uniform(state) < 0.4 else -1
    if device < 0:
        source = below(state, x[0])
        if replicas_in(x, source) < 2:
            return False
        device = remove_replica(x, source, below(state, replicas_in(x, source)))
        if uniform(state) < 0.15:
            return True
    if not insert_device(x, target, device):
        return False
    if abs(target - source) == 1 and source >= 0 and uniform(state) < 0.5:
        s = min(source, target)
        set_end(x, s, end_of(x, s) + source - target)
    return True


@compiled
def _unused_device(x: Any, w: Any) -> Any:
    """Return a random device that holds no stage; -1 if there is none."""
    h, held, state = header(w, WALK), items(w, HELD), items(w, RANDOM)
    for r in range(x[1]):
        held[device_of(x, r)] = 1
    found, first = -1, below(state, h.devices)
    for i in range(h.devices):
        if found < 0 and held[(first + i) % h.devices] == 0:
            found = (first + i) % h.devices
    for r in range(x[1]):
        held[device_of(x, r)] = 0
    return found


@compiled
def _swap_devices(x: Any, state: Any) -> Any:
    """Exchange the devices of two replicas."""
    first, second = device_at(x, below(state, x[1])), device_at(x, below(state, x[1]))
    x[first], x[second] = x[second], x[first]
    return first != second


@compiled
def _rename_device(x: Any, w: Any) -> Any:
    """Exchange two devices in all stages; one of them may be unused."""
    h, state = header(w, WALK), items(w, RANDOM)
    one = device_of(x, below(state, x[1]))
    other = below(state, h.devices)
    _rename(x, one, other)
    return one != other


@compiled
def _swap_stages(x: Any, w: Any) -> Any:
    """Exchange the devices of two stages; where stages go round, wherever these devices are."""
    h, state = header(w, WALK), items(w, RANDOM)
    if x[0] < 2:
        return False
    one, other = below(state, x[0]), below(state, x[0])
    if one == other:
        return False
    count = replicas_in(x, one)
    if replicas_in(x, other) == count:
        for i in range(count):
            a, b = _first_place(x, one) + i, _first_place(x, other) + i
            if h.most_on_device > 1 and h.placement:
                _rename(x, x[a], x[b])
            else:
                x[a], x[b] = x[b], x[a]
        return True
    first, second = min(one, other), max(one, other)
    return _rotate(x, first, second)


@compiled
def _rename(x: Any, one: Any, other: Any) -> Any:
    for at in range(device_at(x, 0), device_at(x, x[1])):
        if x[at] == one:
            x[at] = other
        elif x[at] == other:
            x[at] = one


@compiled
def _rotate(x: Any, first: Any, second: Any) -> Any:
    """Exchange unlike numbers of devices of two stages, by three reversals."""
    a, b = _first_place(x, first), _first_place(x, second + 1)
    more = replicas_in(x, second) - replicas_in(x, first)
    front, back = replicas_in(x, first), replicas_in(x, second)
    _reverse(x, a, b)
    _reverse(x, a, a + back)
    _reverse(x, a + back, b - front)
    _reverse(x, b - front, b)
    for s in range(first + 1, second + 1):
        set_start(x, s, replica_of(x, s) + more)
    return True


@compiled
def _reverse(x: Any, begin: Any, end: Any) -> Any:
    while begin < end - 1:
        end -= 1
        x[begin], x[end] = x[end], x[begin]
        begin += 1


@compiled
def _merge(x: Any, w: Any) -> Any:
    """Merge two stages; without replicas the second one's device is free."""
    h, state = header(w, WALK), items(w, RANDOM)
    if x[0] < 2:
        return False
    s = 1 + below(state, x[0] - 1)
    if not h.replicates or (h.most_on_device > 1 and uniform(state) < 0.5):
        while replicas_in(x, s):
            remove_replica(x, s, 0)
    remove_stage(x, s)
    return True


@compiled
def _divide(x: Any, w: Any) -> Any:
    """Divide a stage and its devices, or give its second part to an unused device."""
    h, state = header(w, WALK), items(w, RANDOM)
    s = below(state, x[0])
    layers, count = end_of(x, s) - begin_of(x, s), replicas_in(x, s)
    if layers < 2:
        return False
    cut = begin_of(x, s) + 1 + below(state, layers - 1)
    if count < 2:
        unused = below(state, h.devices)
        return insert_stage(x, s, cut) and insert_device(x, s + 1, unused)
    at = _first_place(x, s)
    if uniform(state) < 0.5:
        for i in range(count - 1):
            j = i + below(state, count - i)
            x[at + i], x[at + j] = x[at + j], x[at + i]
    elif uniform(state) < 0.5:
        _reverse(x, at, at + count)
    if not insert_stage(x, s, cut):
        return False
    set_start(x, s + 1, replica_of(x, s) + 1 + below(state, count - 1))
    return True


@compiled
def _move_group(x: Any, w: Any) -> Any:
    """Move all replicas of a stage in one place, or of one class there, to another stage or out."""
    h, state = header(w, WALK), items(w, RANDOM)
    if not h.replicates:
        return False
    source, target = below(state, x[0]), below(state, x[0] + 1)
    count = replicas_in(x, source)
    like = device_of(x, replica_of(x, source) + below(state, count))
    is_by_class, places, classes = uniform(state) < 0.5, items(w, PLACE_OF), items(w, CLASS_OF)
    for number in range(count - 1, -1, -1):
        device = device_of(x, replica_of(x, source) + number)
        is_alike = places[device] == places[like]
        if is_by_class:
            is_alike = is_alike and classes[device] == classes[like]
        if is_alike:
            remove_replica(x, source, number)
            if target < x[0]:
                insert_device(x, target, device)
    return target != source


@compiled
def _change_limits(x: Any, w: Any) -> Any:
    """Have a stage, all to it or all from it on recompute or offload to the rank of some layer."""
    h, state = header(w, WALK), items(w, RANDOM)
    table, at = pointer_at(h.table, TABLE), below(state, x[0])
    first = last = at
    if uniform(state) < 0.25:
        if uniform(state) < 0.5:
            first = 0
        else:
            last = x[0] - 1
    if h.in_blocks:
        first, last = 0, x[0] - 1
    layer = begin_of(x, at) + below(state, end_of(x, at) - begin_of(x, at))
    rerun, offload = rerun_of(x, at), offload_of(x, at)
    if h.may_offload and uniform(state) < 0.5:
        offload = h.layers
        if uniform(state) < 0.5:
            offload = min(items(table, OFFLOAD_RANK)[layer], h.layers) + below(state, 2)
    elif not h.may_rerun or uniform(state) < 0.25:
        rerun, offload = AUTOMATIC, 0
    else:
        rerun = min(items(table, RERUN_RANK)[layer], h.layers) + below(state, 2)
    is_changed = False
    for s in range(first, last + 1):
        is_changed = is_changed or rerun_of(x, s) != rerun or offload_of(x, s) != offload
        set_limits(x, s, rerun, offload)
    return is_changed


@compiled
def _come_back(x: Any, w: Any) -> Any:
    """Divide a stage and put the second part, or put a whole stage, on the devices of another."""
    h, state = header(w, WALK), items(w, RANDOM)
    if h.most_on_device < 2:
        return False
    s, other = below(state, x[0]), below(state, x[0])
    layers = end_of(x, s) - begin_of(x, s)
    if layers > 1 and uniform(state) < 0.5:
        if not insert_stage(x, s, begin_of(x, s) + 1 + below(state, layers - 1)):
            return False
        s += 1
        other += other >= s
    if other == s:
        return False
    while replicas_in(x, s):
        remove_replica(x, s, 0)
    for i in range(replicas_in(x, other)):
        if not insert_device(x, s, device_of(x, replica_of(x, other) + i)):
            return False
    return True


@compiled
def _first_place(x: Any, s: Any) -> Any:
    """Return where the devices of a stage begin in the block."""
    return device_at(x, replica_of(x, s))
