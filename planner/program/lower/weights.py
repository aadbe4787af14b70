"""Weights that replicas divide: they start the operations of their stage together."""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.program import COMPUTE, GROUP_DEVICES, GROUPS, IN_ORDER, PROGRAM, TASKS
from planner.program.stage_rows import REPLICA, ROWS, STAGE


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
