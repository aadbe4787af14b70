"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), as a state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from planner.errors import PipeplanError
from planner.records.document import Record


class LossScalePolicy(Record):
    """``[loss_scale]``: dynamic loss scaling for float16.

    The defaults are those of ``torch.amp.GradScaler``.

    Attributes:
        initial: scale of the first step.
        growth_factor: the scale grows by this after ``growth_interval`` good steps in a row.
        backoff_factor: it is multiplied by this after an overflow, whose step is skipped.
        growth_interval: in steps.
        least: training ends if gradients overflow at this scale: scaling cannot help.
        most: the scale grows no further.
    """

    initial: Annotated[float, Field(gt=0)] = 2.0**16
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1, lt=2**63)] = 2000
    least: Annotated[float, Field(gt=0)] = 1.0
    most: Annotated[float, Field(gt=0)] = 2.0**24


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step's loss.

    Attributes:
        scale: multiply the loss by this before the backward, divide the gradients by it after.
        good_steps: since the scale last moved.
        policy: how it moves.
    """

    scale: float
    good_steps: int
    policy: LossScalePolicy

    @classmethod
    def start(cls, policy: LossScalePolicy | None = None) -> LossScale:
        """Before the first step."""
        policy = policy or LossScalePolicy()
        return cls(policy.initial, 0, policy)

    def after(self, *, overflowed: bool) -> LossScale:
        """The scale after a step.

        Args:
            overflowed: whether any rank's gradients were not finite; that step is to be skipped.
                All ranks must pass the same.

        Raises:
            PipeplanError: if gradients overflow even at the least scale.
        """
        policy = self.policy
        if overflowed and self.scale <= policy.least:
            raise PipeplanError(
                f"gradients overflow in float16 even with a loss scale of {self.scale:g}: training "
                "diverges; lower the learning rate, or train in bfloat16 or float32"
            )
        if overflowed:
            lower = max(self.scale * policy.backoff_factor, policy.least)
            return replace(self, scale=lower, good_steps=0)
        if self.good_steps + 1 < policy.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(
            self, scale=min(self.scale * policy.growth_factor, policy.most), good_steps=0
        )

    def facts(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint."""
        policy = self.policy.model_dump()
        return {"scale": self.scale, "good_steps": self.good_steps, "policy": policy}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], source: str = "loss scale") -> LossScale:
        """Resume exactly where a checkpoint was written.

        Raises:
            PipeplanError: if the facts are not such a state.
        """
        try:
            fields = {**facts, "policy": LossScalePolicy(**facts["policy"])}
            found = cls(**fields)
            numbers = (found.scale, found.good_steps)
            if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
                raise ValueError("expected numbers that are not negative")
        except (TypeError, KeyError, ValueError) as error:
            raise PipeplanError(
                f"{source}: not the state of a loss scale: {error}; take another checkpoint"
            ) from None
        return found
