"""The optimizer's part of an iteration: unscale, clip, step, over all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.clip import (
    HeldParameter,
    clip_factor,
    clip_gradients,
    gradient_norm,
    scale_gradients,
)
from executor.failure import talking_to
from executor.learning_rate import Factor, set_learning_rate
from executor.loss_scale import LossScale
from executor.master_weights import MakeOptimizer, MasterWeights
from planner.errors import PipeplanError
from planner.tracing.user_code import FAILURES, told


@dataclass(frozen=True)
class Outcome:
    """What an optimizer step was."""

    learning_rate: float
    gradient_norm: float | None
    skipped: bool


class Optimisation:
    """Trains this rank's parameters.

    Args:
        parameters: by name; gradients agree among the ranks that hold them.
        counted: names that this rank counts in the model's norm: each on one rank.
        optimizer_of: makes the optimizer of parameters by name.
        clip_norm: the whole model's gradient is clipped to it.
        factor: of the learning rate, by step.
        loss_scale: where gradients may overflow; None where they cannot.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: frozenset[str],
        optimizer_of: MakeOptimizer,
        *,
        clip_norm: float | None = None,
        factor: Factor | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.weights = MasterWeights(trained, optimizer_of)
        self.clip_norm = clip_norm
        self.factor = factor
        self.loss_scale = loss_scale
        self._held = [HeldParameter(p, n in counted) for n, p in self.weights.masters.items()]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of the weights, or of their float32 masters."""
        return self.weights.optimizer

    @property
    def scale(self) -> float:
        """What the loss of the next iteration is to be multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def zero_gradients(self) -> None:
        """Before the first backward of an iteration."""
        self.weights.skip()

    def step(self, step: int) -> Outcome:
        """Unscale and clip the gradients and let the optimizer step; all ranks do the same."""
        if self.factor is not None:
            set_learning_rate(self.optimizer, self.factor(step))
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.weights.unscale(self.scale)
        if self.loss_scale is None:
            norm = self._clip()
            self._train(step)
            return Outcome(rate, norm, skipped=False)
        norm = gradient_norm(self._held, _sum)
        overflowed = not math.isfinite(norm)
        if overflowed:
            self.weights.skip()
        else:
            if self.clip_norm is not None:
                scale_gradients(self._held, clip_factor(norm, self.clip_norm))
            self._train(step)
        self.loss_scale = self.loss_scale.after(overflowed=overflowed)
        return Outcome(rate, None if self.clip_norm is None else norm, overflowed)

    def _train(self, step: int) -> None:
        try:
            self.weights.step()
        except FAILURES as error:
            kind = type(self.optimizer).__name__
            raise PipeplanError(f"{kind}.step failed in step {step}: {told(error)}") from error

    def _clip(self) -> float | None:
        if self.clip_norm is None:
            return None
        return clip_gradients(self._held, self.clip_norm, _sum)


def _sum(tensor: Tensor) -> None:
    with talking_to("the other ranks, for the gradient's norm"):
        dist.all_reduce(tensor)
