"""Stashes that travel to the host: when they come back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.plan.operations import Operation, Orders


def brought_back_during(orders: Orders, offloads: Sequence[bool]) -> dict[Operation, Operation]:
    """Return the backwards that need a stash from the host, by the operation before each.

    The stash of a microbatch whose backward directly follows its forward stays on the device, and
    so does that of one whose backward is split.

    Args:
        orders: operations by device.
        offloads: by stage, whether it offloads anything.
    """
    return {
        before: operation
        for order in orders.values()
        for before, operation in pairwise(order)
        if operation.kind == "B"
        and operation.stage < len(offloads)
        and offloads[operation.stage]
        and before != operation._replace(kind="F")
    }
