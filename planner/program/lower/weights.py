"""Weights that replicas divide: they put layers together, and start operations together.

Stages put layers together most of the time where that takes long, so that the rings of all of them
share links; those of the same devices run one after the other.
"""

from __future__ import annotations

from typing import Any

from planner.costs.stage_table import (
    AGAIN_S,
    DIVIDED_GRADIENTS,
    DIVIDED_WEIGHTS,
    SECONDS,
    TABLE,
    is_again,
)
from planner.program.compiled import compiled, header, items, row
from planner.program.lower.collectives import (
    RING,
    add_members,
    messages_of,
    share_links,
    step_s,
)
from planner.program.lower.gradient_tables import COLLECTIVE_S, GRADIENTS
from planner.program.program import COMPUTE, GROUP_DEVICES, GROUPS, IN_ORDER, PROGRAM, TASKS
from planner.program.stage_rows import REPLICA, ROWS, STAGE

WHOLE, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
"""Kinds of operations."""


@compiled
def fill_groups(rows: Any, program: Any, tasks: int) -> None:
    """Have the n-th forwards of such a stage start together, and so its other operations.

    Devices that choose what they run do not wait for each other.
    """
    h, numbers, members = (
        header(rows, ROWS),
        header(program, PROGRAM),
        items(program, GROUP_DEVICES),
    )
    numbers.groups = 0
    if numbers.mode != IN_ORDER:
        return
    at, is_any = 0, False
    for stage in range(h.stages):
        found = row(rows, STAGE, stage)
        for replica in range(found.first, found.last):
            members[at + replica - found.first] = row(rows, REPLICA, replica).device
        for kind in range(4):
            group = row(program, GROUPS, 4 * stage + kind)
            group.device, group.device_end = at, at + found.last - found.first
        at += found.last - found.first
        is_any = is_any or found.is_together
    if not is_any:
        return
    numbers.groups = 4 * h.stages
    for n in range(tasks):
        task = row(program, TASKS, n)
        if task.role == COMPUTE and row(rows, STAGE, task.stage).is_together:
            task.group = 4 * task.stage + task.kind


@compiled
def fill_collectives(rows: Any, table: Any, gradients: Any, wires: Any) -> bool:
    """Work out the collectives around each layer, while all stages have theirs.

    Written are COLLECTIVE_S, and which stages' replicas start together; nobody's seconds.

    Args:
        rows: pointer to the tables of stages.
        table: pointer to the block of the stage table.
        gradients: pointer to the tables of gradients.
        wires: pointer to the tables of the network.

    Returns:
        Whether all replicas of such stages have paths; without one it takes for ever.
    """
    is_joined, stages = True, header(rows, ROWS).stages
    for layer in range(header(table, TABLE).layers):
        items(gradients, COLLECTIVE_S)[2 * layer] = items(gradients, COLLECTIVE_S)[
            2 * layer + 1
        ] = 0.0
    for stage in range(stages):
        found = row(rows, STAGE, stage)
        found.is_together = found.last - found.first > 1 and _divides(table, found)
        is_new = found.is_together == 1
        for other in range(stage):
            is_new = is_new and not _is_same_ring(rows, gradients, stage, other)
        if is_new:
            _set_ring(rows, gradients, stage)
            is_joined = share_links(wires, gradients, RING, 1) and is_joined
    for stage in range(stages):
        if row(rows, STAGE, stage).is_together:
            _set_ring(rows, gradients, stage)
            _write_collectives(row(rows, STAGE, stage), table, gradients, wires)
    for stage in range(stages):
        if row(rows, STAGE, stage).is_together:
            _set_ring(rows, gradients, stage)
            share_links(wires, gradients, RING, 0)
    return is_joined


@compiled
def _divides(table: Any, stage: Any) -> bool:
    bytes_ = 0
    for layer in range(stage.begin, stage.end):
        bytes_ += items(table, DIVIDED_WEIGHTS)[layer]
    return bytes_ > 0


@compiled
def _set_ring(rows: Any, gradients: Any, stage: int) -> None:
    header(gradients, GRADIENTS).members = 0
    add_members(rows, gradients, stage)


@compiled
def _is_same_ring(rows: Any, gradients: Any, stage: int, other: int) -> bool:
    """Return whether another stage has collectives on the same devices."""
    one, two = row(rows, STAGE, stage), row(rows, STAGE, other)
    if not two.is_together or one.last - one.first != two.last - two.first:
        return False
    _set_ring(rows, gradients, stage)
    add_members(rows, gradients, other)
    return bool(header(gradients, GRADIENTS).members == one.last - one.first)


@compiled
def _write_collectives(stage: Any, table: Any, gradients: Any, wires: Any) -> None:
    count, seconds = stage.last - stage.first, items(gradients, COLLECTIVE_S)
    unlike = messages_of(wires, gradients, RING)
    for layer in range(stage.begin, stage.end):
        weights, made = items(table, DIVIDED_WEIGHTS)[layer], items(table, DIVIDED_GRADIENTS)[layer]
        if weights:
            part_s = step_s(wires, gradients, RING, unlike, weights / count)
            seconds[2 * layer] = (count - 1) * part_s
            part_s = step_s(wires, gradients, RING, unlike, made / count)
            seconds[2 * layer + 1] = (count - 1) * part_s


@compiled
def seconds_with_collectives(table: Any, gradients: Any, stage: Any, kind: int, what: int) -> float:
    """Return the seconds of an operation, by its kind, of a stage on a type of devices."""
    total_s, collective_s = 0.0, items(gradients, COLLECTIVE_S)
    for layer in range(stage.begin, stage.end):
        at, again_s, more_s = kind * header(table, TABLE).layers + layer, 0.0, 0.0
        if what != FORWARD and what != WEIGHT_GRADIENT:
            again_s = (
                items(table, AGAIN_S)[at]
                if is_again(table, stage.begin, layer, stage.rerun)
                else 0.0
            )
        if what != WEIGHT_GRADIENT:
            more_s = collective_s[2 * layer]
        if what in (WHOLE, WEIGHT_GRADIENT):
            more_s += collective_s[2 * layer + 1]
        total_s += items(table, SECONDS)[4 * at + what] + again_s + more_s
    return total_s
