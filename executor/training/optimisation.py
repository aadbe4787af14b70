"""The optimizer's part of an iteration: learning rate, unscaling, clipping and the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.distributed.failure import talking_to
from executor.training.loss_scale import LossScale
from executor.training.master_weights import (
    CPU,
    MakeOptimizer,
    MasterWeights,
    clip_factor,
    norm_of,
    scale_gradients,
)
from planner.errors import PipeplanError, shorten
from planner.tracing.user_code import FAILURES, import_callable, one_line

if TYPE_CHECKING:
    from executor.training.state_shards import StateShards

Kind = Literal["constant", "linear", "cosine"]
KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
Factor = Callable[[int], float]
"""Returns the factor of the learning rate in a step; steps count from 1."""


def known_schedule(
    kind: Kind, steps: int, warmup_steps: int = 0, final_factor: float = 0.0
) -> Factor:
    """Return a warm-up and then a constant, linear or cosine course.

    In the warm-up's step s the factor is s / ``warmup_steps``. Then it goes from 1 to
    ``final_factor``, which it has in step ``steps`` and after it: along a line, or along half a
    cosine (Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts).

    Args:
        kind: ``constant`` keeps 1 after the warm-up.
        steps: of the whole training.
        warmup_steps: at most ``steps``.
        final_factor: of the last step, from 0 to 1.
    """

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / warmup_steps
        if kind == "constant":
            return 1.0
        # The whole course when the warm-up ends in the last step: there is nothing to divide.
        done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        left = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return final_factor + (1 - final_factor) * left

    return factor


def custom_schedule(name: str) -> Factor:
    """The user's own ``module:function``, called with the step from 1; returns the factor.

    Only call this with a name the user typed: importing runs code.

    Raises:
        PipeplanError: if it cannot be imported; later, in a step, if it fails or returns something
            else than a finite number from 0.
    """
    function = import_callable(name, "schedule.kind", "lib.rates:triangle")

    def factor(step: int) -> float:
        try:
            found: object = function(step)
        except FAILURES as error:
            raise PipeplanError(
                f"schedule {name!r} failed in step {step}: {one_line(error)}"
            ) from error
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not 0 <= found < math.inf:  # type: ignore[operator]
            raise PipeplanError(
                f"schedule {name!r} returned {shorten(found)} for step {step}; expected a finite "
                "number of at least 0"
            )
        return float(found)  # type: ignore[arg-type]

    return factor


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's rate to its own first rate times the factor.

    The first rate is kept as ``initial_lr`` of the group, as torch's schedulers keep it.
    """
    for group in optimizer.param_groups:
        rate = group.setdefault("initial_lr", group["lr"])
        if isinstance(group["lr"], torch.Tensor):
            group["initial_lr"] = rate = float(rate)
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of an optimizer step; in an emulation nothing is trained.

    Attributes:
        learning_rate: of the step.
        gradient_norm: a scalar that the device may still have to compute; None if nobody asked.
        skipped: whether the step was left out.
        own_norm: of the gradients that this rank counts, or of all ranks'; None if nothing was
            trained.
    """

    learning_rate: float | None
    gradient_norm: Tensor | None
    skipped: bool
    own_norm: Tensor | None = None


@dataclass(frozen=True)
class StepDecision:
    """What is to be done with the gradients of an iteration.

    Attributes:
        skipped: leave the weights as they are.
        factor: for the gradients, a scalar on their device; None: they stay as they are.
    """

    skipped: bool = False
    factor: Tensor | None = None


class Optimisation:
    """Trains this rank's parameters.

    Args:
        parameters: by name; gradients agree among the ranks that hold them.
        counted: names that this rank counts in the model's norm: each on one rank.
        optimizer_of: makes the optimizer of parameters by name.
        clip_norm: the whole model's gradient is clipped to it.
        factor: of the learning rate, by step.
        loss_scale: where gradients may overflow; None where they cannot. Whether they have is asked
            of the device in each step, which waits for it.
        device: of the parameters.
        shards: of the parameters whose state other ranks share; None: all state is this rank's.
        skip_non_finite: leave out a step whose gradient is not finite; asks the device in each.

    Attributes:
        weights: that are trained.
        shards: as they were given.
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
        device: torch.device = CPU,
        shards: StateShards | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if shards is not None:
            trained = shards.divided(trained)
        self.shards = shards
        self.weights = MasterWeights(trained, optimizer_of)
        self.clip_norm = clip_norm
        self.factor = factor
        self.loss_scale = loss_scale
        self._counted = counted & self.weights.masters.keys()
        self._device = device
        self._skips = skip_non_finite

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the weights, or of their float32 masters."""
        return self.weights.optimizer

    @property
    def scale(self) -> float:
        """The factor of the next iteration's loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def resume_scale(self, loss_scale: LossScale) -> None:
        """Go on with a loss scale of a checkpoint or another pipeline."""
        self.loss_scale = loss_scale

    def zero_gradients(self) -> None:
        """Before the first backward of an iteration."""
        self.weights.skip()

    def step(self, step: int) -> StepOutcome:
        """Unscale and clip the gradients and let the optimizer step; all ranks do the same."""
        rate = self.set_rate(step)
        self.weights.unscale(self.scale)
        masters = self.weights.masters.items()
        counted = (master.grad for name, master in masters if name in self._counted)
        norm = self.norm((gradient, 1.0) for gradient in counted if gradient is not None)
        decided = self.judge(norm)
        if decided.skipped:
            self.weights.skip()
        else:
            scale_gradients(self.weights.masters.values(), decided.factor)
            self._train(step, None)
        return self.outcome(rate, norm, decided)

    # --- the same in parts, for strategies that let the optimizer step on some parameters first ---

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate of a step."""
        if self.factor is not None:
            set_learning_rate(self.optimizer, self.factor(step))
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def needs_norm(self) -> bool:
        """Whether a step depends on the norm of the whole gradient."""
        return self.clip_norm is not None or self.may_skip

    @property
    def may_skip(self) -> bool:
        """Whether steps are left out whose gradients are not finite."""
        return self.loss_scale is not None or self._skips

    def norm(self, pieces: Iterable[tuple[Tensor, float]]) -> Tensor:
        """The norm of pieces of gradients, each times a factor; all ranks call it.

        It is that of all ranks' pieces if a step depends on it, else of this rank's own.
        """
        return norm_of(pieces, self._sum, self._device)

    def _sum(self, total: Tensor) -> None:
        if self.needs_norm:
            with talking_to("the other ranks, for the gradient's norm"):
                dist.all_reduce(total)

    def is_counted(self, name: str) -> bool:
        """Return whether this rank counts a parameter in the model's norm."""
        return name in self._counted

    def judge(self, norm: Tensor) -> StepDecision:
        """Decide on gradients of this norm; moves the loss scale on.

        All ranks pass the same norm if a step depends on it. One that is not finite, where no step
        is skipped, is told by whoever reads it
        (:func:`~executor.training.master_weights.require_finite`): no step waits for the device.
        """
        if self.may_skip:
            overflowed = not math.isfinite(norm)
            if self.loss_scale is not None:
                self.loss_scale = self.loss_scale.after(overflowed=overflowed)
            if overflowed:
                return StepDecision(skipped=True)
        return StepDecision(
            factor=None if self.clip_norm is None else clip_factor(norm, self.clip_norm)
        )

    def outcome(self, rate: float, norm: Tensor, decided: StepDecision) -> StepOutcome:
        """Return the outcome of a step, from its norm and what :meth:`judge` decided."""
        told = None if self.clip_norm is None else norm
        return StepOutcome(rate, told, decided.skipped, norm)

    def train(
        self, step: int, names: Iterable[str], scale: float = 1.0, factor: Tensor | None = None
    ) -> None:
        """Let the optimizer step on some parameters by the gradients they hold.

        The optimizer must treat each parameter by itself, as torch's AdamW and SGD do.

        Args:
            step: for a message.
            names: of the parameters; those that are not trained here do not matter.
            scale: of the loss that the gradients are of.
            factor: of what :meth:`judge` decided.
        """
        mine = [name for name in names if name in self.weights.masters]
        self.weights.unscale(scale, mine)
        scale_gradients((self.weights.masters[name] for name in mine), factor)
        self._train(step, mine)

    def _train(self, step: int, names: Iterable[str] | None) -> None:
        try:
            if names is None:
                self.weights.step()
            else:
                self.weights.step_only(names)
        except FAILURES as error:
            kind = type(self.optimizer).__name__
            raise PipeplanError(f"{kind}.step failed in step {step}: {one_line(error)}") from error
