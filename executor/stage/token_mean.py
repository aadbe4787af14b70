"""The mean loss over all tokens of an iteration, in place of the mean of microbatches' means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from planner.job import TARGET

IGNORED = -100
"""The target that torch's cross entropy leaves out."""


class TokenMean:
    """Gives each microbatch the weight of its tokens among all of the iteration.

    A token is a target that is not ignored. With n_m of them in microbatch m, whose loss L_m is
    their mean, the iteration's loss is sum(n_m L_m) / sum(n_m), over all replicas: what one process
    has for the whole batch.

    Args:
        device: of the stage that makes the loss.
        group: process group of its replicas; None: it has one.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self._device = device
        self._group = group

    def weights(self, batches: Mapping[int, Mapping[str, Tensor]]) -> dict[int, Tensor]:
        """Return the weights of this replica's microbatches; all replicas call it.

        Args:
            batches: by microbatch.

        Returns:
            Scalars by microbatch; not a number if no replica has a token.
        """
        counts = torch.tensor([tokens_of(batch) for batch in batches.values()])
        counts = counts.to(self._device, torch.float64)
        total = counts.sum()
        if self._group is not None:
            with talking_to("the other ranks of the last stage, to count tokens"):
                dist.all_reduce(total, group=self._group)
        return dict(zip(batches, counts / total, strict=True))


def tokens_of(batch: Mapping[str, Tensor]) -> int:
    """Return how many targets of a microbatch are not ignored."""
    target = batch[TARGET]
    return target.numel() if target.is_floating_point() else int((target != IGNORED).sum())


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """Return a microbatch's part of the loss; one without tokens, whose mean is none, has none."""
    return torch.where(weight == 0, 0.0, loss.double() * weight)
