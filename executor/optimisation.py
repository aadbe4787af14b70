"""The optimizer's part of an iteration: unscale, clip, step, over all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.clip import (
    HeldParameter,
    clip_factor,
    gradient_norm,
    norm_of,
    require_finite,
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
        self._held = {n: HeldParameter(p, n in counted) for n, p in self.weights.masters.items()}
        self._device = next((p.device for p in trained.values()), torch.device("cpu"))

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
        rate = self.set_rate(step)
        self.weights.unscale(self.scale)
        norm = gradient_norm(self._held.values(), _sum) if self.needs_norm else None
        factor = self.judge(norm)
        if factor is None:
            self.weights.skip()
        else:
            scale_gradients(self._held.values(), factor)
            self._train(step, None)
        return self.outcome(rate, norm, factor)

    # --- the same in parts, for strategies that let the optimizer step on some parameters first ---

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate of a step."""
        if self.factor is not None:
            set_learning_rate(self.optimizer, self.factor(step))
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def needs_norm(self) -> bool:
        """Whether a step depends on the norm of the whole gradient."""
        return self.clip_norm is not None or self.loss_scale is not None

    def norm(self, pieces: Iterable[tuple[Tensor, float]]) -> float:
        """The norm of all ranks' pieces of gradients, each times a factor; all ranks call it."""
        return norm_of(pieces, self._device, _sum)

    def is_counted(self, name: str) -> bool:
        """Whether this rank counts a parameter in the model's norm."""
        return name in self._held and self._held[name].counted

    def judge(self, norm: float | None) -> float | None:
        """What gradients of this norm are to be multiplied by; None: the step is to be skipped.

        Moves the loss scale on. All ranks pass the same norm.

        Raises:
            PipeplanError: if the norm is not finite, and no loss scale explains it.
        """
        if norm is None:
            return 1.0
        if self.loss_scale is None:
            require_finite(norm)
        else:
            self.loss_scale = self.loss_scale.after(overflowed=not math.isfinite(norm))
        if not math.isfinite(norm):
            return None
        return 1.0 if self.clip_norm is None else clip_factor(norm, self.clip_norm)

    def outcome(self, rate: float, norm: float | None, factor: float | None) -> Outcome:
        """Of a step with a learning rate, a norm and what :meth:`judge` said of it."""
        return Outcome(rate, None if self.clip_norm is None else norm, skipped=factor is None)

    def train(
        self, step: int, names: Iterable[str], scale: float = 1.0, factor: float = 1.0
    ) -> None:
        """Let the optimizer step on some parameters by the gradients they hold.

        The optimizer must treat each parameter by itself, as torch's AdamW and SGD do.

        Args:
            step: for a message.
            names: of the parameters; those that are not trained here do not matter.
            scale: of the loss that the gradients are of.
            factor: what :meth:`judge` said.
        """
        mine = [name for name in names if name in self._held]
        self.weights.unscale(scale, mine)
        scale_gradients((self._held[name] for name in mine), factor)
        self._train(step, mine)

    def _train(self, step: int, names: Iterable[str] | None) -> None:
        try:
            if names is None:
                self.weights.step()
            else:
                self.weights.step_only(names)
        except FAILURES as error:
            kind = type(self.optimizer).__name__
            raise PipeplanError(f"{kind}.step failed in step {step}: {told(error)}") from error


def _sum(tensor: Tensor) -> None:
    with talking_to("the other ranks, for the gradient's norm"):
        dist.all_reduce(tensor)
