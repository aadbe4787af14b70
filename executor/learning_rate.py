"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from planner.errors import PipeplanError, shorten
from planner.tracing.imports import import_callable
from planner.tracing.user_code import FAILURES, told

Kind = Literal["constant", "linear", "cosine"]
KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
Factor = Callable[[int], float]
"""What the learning rate is multiplied by in a step; steps count from 1."""


@dataclass(frozen=True)
class Schedule:
    """A warm-up and then a constant, linear or cosine course.

    In the warm-up's step s the factor is s / ``warmup_steps``. Then it goes from 1 to
    ``final_factor``, which it has in step ``steps`` and after it: along a line, or along half a
    cosine (Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts).

    Attributes:
        kind: ``constant`` keeps 1 after the warm-up.
        steps: of the whole training.
        warmup_steps: at most ``steps``.
        final_factor: of the last step, from 0 to 1.
    """

    kind: Kind
    steps: int
    warmup_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps <= self.steps:
            raise PipeplanError(
                f"schedule.warmup_steps: {self.warmup_steps} of {self.steps} steps; expected 0 to "
                f"{self.steps}"
            )

    def __call__(self, step: int) -> float:
        """The factor of a step from 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        # The whole course when the warm-up ends in the last step: there is nothing to divide.
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_factor + (1 - self.final_factor) * left


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
                f"schedule {name!r} failed in step {step}: {told(error)}"
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
