"""List schedules: whenever a device is free, it runs the most urgent operation that memory allows.

Priorities, limits on the microbatches in flight and memory are those of the compiled list
scheduling of :mod:`planner.program`, which replays the program meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Orders
from planner.program.compiled import Block
from planner.program.lower.lower import lower_schedule
from planner.program.replay import operations, replay
from planner.program.schedule import (
    BACKWARD_FIRST,
    DUE_S,
    FORWARD_FIRST,
    IS_SPLIT,
    LIMIT,
    MOST_OWED,
    OWNER,
    PERIOD_S,
    RESERVE_BYTES,
    RHYTHM,
    schedule_for,
)
from planner.schedules.assignment import Assignment

NAMES = {
    BACKWARD_FIRST: "list, backward first",
    FORWARD_FIRST: "list, forward first",
    RHYTHM: "list, even rhythm",
}
"""The rules of order by name. Backwards first frees memory, as 1F1B does; forwards first fills the
later stages early. In an even rhythm what is due first comes first: microbatches enter at the pace
of the most loaded device, so that devices of several stages do not run ahead in the early ones."""
FACTORS = (1.0, 2.0, 1.5, math.inf)
"""Limits on microbatches in flight as multiples of 1F1B's; the last are memory's own."""
STRETCHES = (2.5, 4.0)
"""Multiples of a microbatch's least way that it takes among others, in an even rhythm."""
DEFERRED = 1e3
"""Weight gradients are due so many periods late: nothing waits for them but memory."""
MOST_CORRECTIONS = 6
"""Tries to keep free what devices lacked."""


class ListRule(NamedTuple):
    """A way to schedule greedily.

    Attributes:
        priority: a rule of order, see :data:`NAMES`.
        factor: the microbatches in flight, as a multiple of 1F1B's.
        split: whether backwards run as input and weight gradients.
        stretch: see :data:`STRETCHES`.
    """

    priority: int
    factor: float
    split: bool
    stretch: float = STRETCHES[0]


def list_rules(pipeline: PlacedPipeline, *, split: bool) -> Iterator[ListRule]:
    """Yield the rules worth trying; of factors that memory makes equal limits of, the first."""
    factors = {_limits(pipeline, factor): factor for factor in reversed(FACTORS)}
    for factor, priority in product(FACTORS, (BACKWARD_FIRST, FORWARD_FIRST)):
        if factor in factors.values():
            yield ListRule(priority, factor, split)
    if pipeline.shares_devices:
        for stretch in STRETCHES:
            yield ListRule(RHYTHM, math.inf, split, stretch)


def list_orders(pipeline: PlacedPipeline, owner: Assignment, rule: ListRule) -> Orders | None:
    """Return the orders of a list schedule that fits memory; None if it does not.

    The scheduler does not know what is on its way to a device. What a device lacked in one try is
    kept free in the next.

    Args:
        pipeline: the stages.
        owner: the replica of each (stage, microbatch).
        rule: how to choose.
    """
    schedule = _schedule(pipeline, owner, rule)
    if schedule is None:
        return None
    for _ in range(MOST_CORRECTIONS):
        lowered = lower_schedule(pipeline, schedule)
        try:
            times = replay(lowered.program)
        except DeadlockError:  # Limits leave no way to finish.
            return None
        devices = lowered.program.devices
        over = np.maximum(times.peak_bytes - devices["capacity_bytes"], 0)
        if not over.any():
            ends = zip(pipeline.devices, devices["order"], devices["order_end"], strict=True)
            rows = operations(lowered.program, times.order)
            return {name: rows[first:end] for name, first, end in ends}
        schedule[RESERVE_BYTES][:] += over
    return None


def _schedule(pipeline: PlacedPipeline, owner: Assignment, rule: ListRule) -> Block | None:
    """Return the table of a rule; None if a stage has no room for a microbatch."""
    stages = pipeline.stages
    pairs = [(s, device) for s, stage in enumerate(stages) for device in stage.spec.devices]
    limits = _limits(pipeline, rule.factor)
    if min(limits) < 1:
        return None
    found = schedule_for(len(stages), len(pairs), len(pipeline.devices), pipeline.microbatches)
    numbers, microbatches = {pair: n for n, pair in enumerate(pairs)}, range(pipeline.microbatches)
    found[OWNER][:] = [numbers[s, owner[s, m]] for s in range(len(stages)) for m in microbatches]
    found.numbers["rule"] = rule.priority
    splits = split_stages(pipeline) if rule.split else frozenset()
    found[IS_SPLIT][:] = [stage in splits for stage in range(len(stages))]
    found[LIMIT][:] = limits
    found[MOST_OWED][:] = [max(1.0, _most_owed(pipeline, *pair)) for pair in pairs]
    if rule.priority == RHYTHM:
        _set_rhythm(found, pipeline, rule)
    return found


def _limits(pipeline: PlacedPipeline, factor: float) -> tuple[int, ...]:
    rows = enumerate(pipeline.stages)
    return tuple(_limit(pipeline, s, d, factor) for s, row in rows for d in row.spec.devices)


def _limit(pipeline: PlacedPipeline, stage: int, device: str, factor: float) -> int:
    most = pipeline.stash_limit(stage, device)
    if math.isinf(factor):
        return most
    return min(most, max(1, round(factor * _in_flight(pipeline, stage))))


def _in_flight(pipeline: PlacedPipeline, stage: int) -> int:
    """Return the microbatches that a replica of a stage has in flight in 1F1B."""
    replicas = [len(row.spec.devices) for row in pipeline.stages]
    return -(-sum(replicas[stage:]) // replicas[stage])


def split_stages(pipeline: PlacedPipeline) -> frozenset[int]:
    """Return the stages whose backwards a list schedule splits, if it splits any.

    Where the job allows both kinds, those that hold what a weight gradient needs besides 1F1B's
    microbatches in flight: fewer of these cost more than whole backwards.
    """
    return frozenset(
        number
        for number, stage in enumerate(pipeline.stages)
        if pipeline.problem.job.backward != "any"
        or all(_most_owed(pipeline, number, device) >= 1 for device in stage.spec.devices)
    )


def _most_owed(pipeline: PlacedPipeline, stage: int, device: str) -> float:
    """Return for how many weight gradients there is room besides 1F1B's microbatches in flight."""
    placed = pipeline.stages[stage]
    if not placed.weight_stash_bytes:
        return math.inf
    room = pipeline.capacity_bytes(device) - pipeline.static_bytes(device)
    # The last of the microbatches has just had its input gradient.
    room -= (_in_flight(pipeline, stage) - 1) * placed.stash_bytes + placed.input_gradient_bytes
    return room // placed.weight_stash_bytes


def _set_rhythm(schedule: Block, pipeline: PlacedPipeline, rule: ListRule) -> None:
    ways, period_s = PathBounds(pipeline, rule.split), _period_s(pipeline)
    turn_s = ways.head[-1] + ways.forward[-1] + ways.back[-1]
    back = [turn_s - way_s for way_s in ways.back]
    weights = [way_s + DEFERRED * period_s for way_s in back]
    schedule[DUE_S][:] = rule.stretch * np.ravel([back, ways.head, back, weights])
    schedule[PERIOD_S][0] = period_s


def _period_s(pipeline: PlacedPipeline) -> float:
    """Return the seconds of a microbatch on the most loaded device."""
    stages = pipeline.stages
    return max(
        sum(
            (stages[s].times[device].forward_s + stages[s].times[device].backward_s)
            / len(stages[s].spec.devices)
            for s in held
        )
        for device, held in pipeline.stages_on.items()
    )
