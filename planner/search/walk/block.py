"""A layout's stages as one array of integers, which compiled code copies and changes.

``x[0]`` stages and ``x[1]`` replicas are in use, of ``x[2]`` and ``x[3]`` that there is room for.
``x[4]`` to ``x[7]`` tell how operations are scheduled: the number of the assignment of microbatches
to replicas, the rule of order, whether backwards are split, the number of the limits. Behind these
are, of each stage, the end (the layer behind its last), the limits on the layers that it recomputes
and offloads (:mod:`planner.costs.stage_table`; :data:`AUTOMATIC`: the least with which enough
microbatches fit), and the place where its replicas begin; then the devices of all replicas, stage
by stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.program.compiled import compiled

Block = NDArray[np.int32]
AUTOMATIC = -1
OWNER_CHOICE, RULE_CHOICE, SPLIT_CHOICE, LIMIT_CHOICE, HEADER = range(4, 9)


def block_for(stages: int, replicas: int) -> Block:
    """Return an empty block with room for so many stages and replicas."""
    x = np.zeros(HEADER + 4 * stages + 1 + replicas, dtype=np.int32)
    x[2], x[3] = stages, replicas
    return x


def filled(
    empty: Block,
    ends: Sequence[int],
    devices: Sequence[Sequence[int]],
    limits: Sequence[tuple[int, int]] = (),
) -> Block:
    """Return a block of stages.

    Args:
        empty: a block with room for them.
        ends: of each stage, the layer behind its last.
        devices: numbers of each stage's devices.
        limits: of each stage, on recomputed and on offloaded layers; none: automatic.
    """
    x, count, room = empty.copy(), len(ends), int(empty[2])
    x[0], x[1] = count, sum(map(len, devices))
    x[HEADER : HEADER + count] = ends
    for s in range(count):
        x[HEADER + room + s], x[HEADER + 2 * room + s] = limits[s] if limits else (AUTOMATIC, 0)
    starts = HEADER + 3 * room
    x[starts : starts + count + 1] = np.cumsum([0, *map(len, devices)])
    x[starts + room + 1 : starts + room + 1 + x[1]] = [d for row in devices for d in row]
    return x


def devices_of(x: Block, s: int) -> list[int]:
    """Return the devices of a stage."""
    place = HEADER + 4 * int(x[2]) + 1
    starts = x[HEADER + 3 * int(x[2]) :]
    found: list[int] = x[place + starts[s] : place + starts[s + 1]].tolist()
    return found


@compiled
def end_of(x: Any, s: Any) -> Any:
    """Return the layer behind the last one of a stage."""
    return x[HEADER + s]


@compiled
def begin_of(x: Any, s: Any) -> Any:
    """Return the first layer of a stage."""
    return x[HEADER + s - 1] if s > 0 else 0


@compiled
def set_end(x: Any, s: Any, layer: Any) -> Any:
    """Move the end of a stage."""
    x[HEADER + s] = layer


@compiled
def replica_of(x: Any, s: Any) -> Any:
    """Return the first replica of a stage, or behind the last stage the number of replicas."""
    return x[HEADER + 3 * x[2] + s]


@compiled
def replicas_in(x: Any, s: Any) -> Any:
    """Return the number of replicas of a stage."""
    at = HEADER + 3 * x[2] + s
    return x[at + 1] - x[at]


@compiled
def set_start(x: Any, s: Any, replica: Any) -> Any:
    """Have the replicas of a stage begin elsewhere."""
    x[HEADER + 3 * x[2] + s] = replica


@compiled
def rerun_of(x: Any, s: Any) -> Any:
    """Return the limit on the layers that a stage recomputes."""
    return x[HEADER + x[2] + s]


@compiled
def offload_of(x: Any, s: Any) -> Any:
    """Return the limit on the layers that a stage offloads."""
    return x[HEADER + 2 * x[2] + s]


@compiled
def set_limits(x: Any, s: Any, rerun: Any, offload: Any) -> Any:
    """Choose what a stage recomputes and offloads."""
    x[HEADER + x[2] + s] = rerun
    x[HEADER + 2 * x[2] + s] = offload


@compiled
def device_at(x: Any, replica: Any) -> Any:
    """Return the place of a replica's device in the block."""
    return HEADER + 4 * x[2] + 1 + replica


@compiled
def device_of(x: Any, replica: Any) -> Any:
    """Return the device of a replica."""
    return x[HEADER + 4 * x[2] + 1 + replica]


@compiled
def has_device(x: Any, s: Any, device: Any) -> Any:
    """Return whether a stage is on a device."""
    for r in range(replica_of(x, s), replica_of(x, s + 1)):
        if device_of(x, r) == device:
            return True
    return False


@compiled
def insert_device(x: Any, s: Any, device: Any) -> Any:
    """Put a stage on one device more; return whether there was room and it was not there yet."""
    if x[1] >= x[3] or has_device(x, s, device):
        return False
    at = device_at(x, replica_of(x, s + 1))
    for i in range(device_at(x, x[1]), at, -1):
        x[i] = x[i - 1]
    x[at] = device
    for later in range(s + 1, x[0] + 1):
        x[HEADER + 3 * x[2] + later] += 1
    x[1] += 1
    return True


@compiled
def remove_replica(x: Any, s: Any, number: Any) -> Any:
    """Take a stage from the device of its n-th replica, and return that device."""
    at = device_at(x, replica_of(x, s) + number)
    device = x[at]
    for i in range(at, device_at(x, x[1]) - 1):
        x[i] = x[i + 1]
    for later in range(s + 1, x[0] + 1):
        x[HEADER + 3 * x[2] + later] -= 1
    x[1] -= 1
    return device


@compiled
def insert_stage(x: Any, s: Any, cut: Any) -> Any:
    """Divide a stage; its second part has no devices yet. Return whether there is room."""
    if x[0] >= x[2]:
        return False
    for i in range(x[0], s, -1):
        set_end(x, i, end_of(x, i - 1))
        set_limits(x, i, rerun_of(x, i - 1), offload_of(x, i - 1))
    set_end(x, s, cut)
    starts = HEADER + 3 * x[2]
    for i in range(x[0] + 1, s + 1, -1):
        x[starts + i] = x[starts + i - 1]
    x[0] += 1
    return True


@compiled
def remove_stage(x: Any, s: Any) -> Any:
    """Give the layers and the devices of a stage to the one before it."""
    set_end(x, s - 1, end_of(x, s))
    starts = HEADER + 3 * x[2]
    for i in range(s, x[0] - 1):
        set_end(x, i, end_of(x, i + 1))
        set_limits(x, i, rerun_of(x, i + 1), offload_of(x, i + 1))
    for i in range(s, x[0]):
        x[starts + i] = x[starts + i + 1]
    x[0] -= 1


@compiled
def tidy(x: Any) -> Any:
    """Sort the devices of every stage, and drop those that a stage has twice."""
    for s in range(x[0]):
        first, number = replica_of(x, s), 1
        for r in range(first + 1, replica_of(x, s + 1)):
            at, device = device_at(x, r), device_of(x, r)
            while at > device_at(x, first) and x[at - 1] > device:
                x[at] = x[at - 1]
                at -= 1
            x[at] = device
        while number < replicas_in(x, s):
            if device_of(x, first + number) == device_of(x, first + number - 1):
                remove_replica(x, s, number)
            else:
                number += 1


@compiled
def copy_block(source: Any, target: Any) -> Any:
    """Make a block equal to another one with the same room."""
    head = device_at(source, source[1])
    for i in range(head):
        target[i] = source[i]


@compiled
def digest_of(x: Any) -> Any:
    """Return a number of 64 bits that differs, in all likelihood, between unlike blocks."""
    value = np.uint64(x[0])
    starts = HEADER + 3 * x[2]
    for at in range(OWNER_CHOICE, HEADER):
        value = _mixed(value, x[at])
    for s in range(x[0]):
        for word in (end_of(x, s), x[starts + s + 1], rerun_of(x, s), offload_of(x, s)):
            value = _mixed(value, word)
    for r in range(x[1]):
        value = _mixed(value, device_of(x, r))
    return value


@compiled
def _mixed(value: Any, word: Any) -> Any:
    # Compiled functions are given whole numbers as int64.
    mixed = (np.uint64(value) ^ np.uint64(word + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))
