"""Rules of order for list schedules of gathered rows, compiled: limits, priorities and rhythm."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.wires import GB_PER_S, LATENCY_S, pair_of
from planner.program.schedule import (
    DUE_S,
    IS_SPLIT,
    LIMIT,
    MOST_OWED,
    PERIOD_S,
    RESERVE_BYTES,
    RHYTHM,
    SCHEDULE,
)
from planner.program.stage_rows import (
    DEVICE,
    RECEIVED_BYTES,
    RECEIVED_S,
    REPLICA,
    ROWS,
    SECONDS,
    STAGE,
)

DEFERRED = 1000
"""Weight gradients count as due so many periods late: nothing waits for them but memory."""


@compiled
def set_limits_in_flight(
    rows: Any, schedule: Any, factor: Any, splits: Any, may_stay_whole: Any
) -> Any:
    """Limit the microbatches in flight to a multiple of 1F1B's, within memory.

    Args:
        rows: pointer to the rows of the stages.
        schedule: pointer to the schedule, written.
        factor: of the limits; infinite: as many as memory holds.
        splits: whether backwards are split.
        may_stay_whole: whether those are not split for whose weight gradients there is no room
            beside 1F1B's microbatches in flight.

    Returns:
        Whether every replica has room for a microbatch.
    """
    numbers = header(rows, ROWS)
    is_split = items(schedule, IS_SPLIT)
    for s in range(numbers.stages):
        is_split[s] = splits
    for place in range(numbers.devices):
        items(schedule, RESERVE_BYTES)[place] = 0
    for r in range(numbers.replicas):
        replica = row(rows, REPLICA, r)
        stage, device = row(rows, STAGE, replica.stage), row(rows, DEVICE, replica.device)
        making = stage.output_bytes if items(rows, SECONDS)[4 * r + 1] > 0 else 0
        free = device.capacity_bytes - device.static_bytes
        kept = stage.stash_bytes - stage.offload_bytes
        limit = _fitting(free - making - stage.offload_bytes, kept, numbers.microbatches)
        if factor < np.inf:
            more = np.int64(np.rint(factor * flight_of(rows, replica.stage)))
            limit = min(limit, max(1, more))
        if limit <= 0:
            return False
        items(schedule, LIMIT)[r] = limit
        items(schedule, MOST_OWED)[r] = np.inf
        if splits and stage.weight_stash_bytes:
            held = (max(1, flight_of(rows, replica.stage)) - 1) * stage.stash_bytes
            room = free - held - stage.input_gradient_bytes
            owed = np.floor(room / stage.weight_stash_bytes)
            if may_stay_whole and owed < 1:
                is_split[replica.stage] = 0
            items(schedule, MOST_OWED)[r] = max(1.0, owed)
    return True


@compiled
def _fitting(free: Any, each: Any, most: Any) -> Any:
    if free < 0:
        return 0
    return min(most, free // each) if each > 0 else most


@compiled
def flight_of(rows: Any, s: Any) -> Any:
    """Return how many microbatches a replica of a stage has in flight in 1F1B."""
    stage = row(rows, STAGE, s)
    return -(-(header(rows, ROWS).replicas - stage.first) // (stage.last - stage.first))


@compiled
def set_rhythm(rows: Any, schedule: Any, wires: Any, stretch: Any, splits: Any) -> Any:
    """Have first run what is due first: microbatches enter at the pace of the most loaded device.

    A microbatch's way takes ``stretch`` times what it would take alone. So a device that holds
    several stages neither runs ahead in its early ones nor leaves the late ones without work.
    """
    numbers, due_s = header(rows, ROWS), items(schedule, DUE_S)
    stages = numbers.stages
    header(schedule, SCHEDULE).rule = RHYTHM
    back = 2 if splits else 0
    way_s = 0.0
    for s in range(stages):
        if s > 0:
            way_s += _message_s(rows, wires, s - 1, s, 1)
        due_s[stages + s] = stretch * way_s
        way_s += _least_s(rows, s, 1)
    for s in range(stages - 1, -1, -1):
        if s + 1 < stages:
            way_s += _message_s(rows, wires, s + 1, s, 0)
        due_s[s] = due_s[2 * stages + s] = stretch * way_s
        way_s += _least_s(rows, s, back)
    period_s = _period_s(rows)
    for s in range(stages):
        due_s[3 * stages + s] = due_s[s] + stretch * DEFERRED * period_s
    items(schedule, PERIOD_S)[0] = period_s


@compiled
def _least_s(rows: Any, s: Any, kind: Any) -> Any:
    stage, least_s = row(rows, STAGE, s), np.inf
    for r in range(stage.first, stage.last):
        least_s = min(least_s, items(rows, SECONDS)[4 * r + kind])
    return least_s


@compiled
def _message_s(rows: Any, wires: Any, source: Any, target: Any, forward: Any) -> Any:
    """Return the seconds of a message between the first replicas of two stages."""
    first = row(rows, STAGE, target).first
    here = row(rows, DEVICE, row(rows, REPLICA, row(rows, STAGE, source).first).device).number
    there = row(rows, DEVICE, row(rows, REPLICA, first).device).number
    bytes_ = items(rows, RECEIVED_BYTES)[2 * target + forward]
    if bytes_ == 0 or here == there:
        return 0.0
    pair = pair_of(wires, here, there)
    moving_s = items(wires, LATENCY_S)[pair] + bytes_ / (items(wires, GB_PER_S)[pair] * 1e9)
    return moving_s + items(rows, RECEIVED_S)[2 * first + forward]


@compiled
def _period_s(rows: Any) -> Any:
    """Return the seconds of a microbatch on the most loaded device."""
    numbers, most_s = header(rows, ROWS), 0.0
    for place in range(numbers.devices):
        load_s = 0.0
        for r in range(numbers.replicas):
            replica = row(rows, REPLICA, r)
            if replica.device == place:
                stage = row(rows, STAGE, replica.stage)
                each_s = items(rows, SECONDS)[4 * r] + items(rows, SECONDS)[4 * r + 1]
                load_s += each_s / (stage.last - stage.first)
        most_s = max(most_s, load_s)
    return most_s
