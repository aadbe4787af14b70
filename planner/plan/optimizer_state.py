"""What cannot yet be done with optimizer state that replicas share (ZeRO-1)."""

from __future__ import annotations

import json

from planner.errors import PipeplanError
from planner.space import Space


def require_whole_state(space: Space, what: str) -> None:
    """Refuse shared optimizer state where only whole state on every replica is supported.

    Args:
        space: of the job.
        what: what does not support it, such as ``export --to megatron``.

    Raises:
        PipeplanError: if replicas share the state, or may.
    """
    if space.shard_optimizer:
        raise PipeplanError(
            f"shard_optimizer = {json.dumps(space.shard_optimizer)}: {what} supports optimizer "
            "state that is whole on every replica only so far; use a plan, or a job, with "
            "shard_optimizer = false"
        )


def require_decided_state(space: Space, what: str) -> None:
    """Refuse to leave it open whether replicas share the optimizer's state, or stashes offload.

    Args:
        space: of the job.
        what: what needs to know, such as ``compare``.

    Raises:
        PipeplanError: if the job leaves it open.
    """
    for name in ("shard_optimizer", "offload"):
        if getattr(space, name) == "if_needed":
            raise PipeplanError(
                f'{name} = "if_needed": {what} does not decide that; set it to true or false'
            )
