"""What cannot yet be done with stashes that are offloaded to the host."""

from __future__ import annotations

import json

from planner.errors import PipeplanError
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
