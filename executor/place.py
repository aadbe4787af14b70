"""Which of the plan's processes this is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Which process this is."""

    rank: int
    world_size: int

    @staticmethod
    def of_this_process() -> Place:
        """From the process group if there is one, else from what torchrun sets."""
        if dist.is_initialized():
            return Place(dist.get_rank(), dist.get_world_size())
        return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
