"""Stashes that travel to the host: when they come back, and what cannot yet be done with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from planner.errors import PipeplanError
from planner.plan.operations import Operation, Orders
from planner.space import Space


def require_no_offload(space: Space, what: str) -> None:
    """Refuse offloaded stashes where only those that stay on the device are supported.

    Args:
        space: of the job.
        what: what does not support it, such as ``export --to megatron``.

    Raises:
        PipeplanError: if the job allows to offload stashes.
    """
    if space.offload:
        raise PipeplanError(
            f"offload = {json.dumps(space.offload)}: {what} supports stashes that stay on their "
            "devices only so far; use a plan, or a job, with offload = false"
        )


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
