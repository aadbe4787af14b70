"""The interface between the step loop and the stages of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.plan.operations import Operation


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor that will be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Worker:
    """One stage on this rank, which computes or is emulated; a kind has what it has use for.

    Attributes:
        is_last: whether the stage makes the loss.
        statistics: what the microbatches of the iteration observed, an
            :class:`executor.stage.statistics.Statistics`; None without running statistics.
    """

    is_last: bool
    statistics: Any = None

    @property
    def batch_wait_s(self) -> float:
        """Seconds for which the iteration waited until its batches were loaded."""
        return 0.0

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        return ()

    def returning(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the gradients that the next stage sends back for a microbatch."""
        return ()

    def begin(self, step: int, loss_scale: float) -> None:
        """Begin an iteration, whose loss is multiplied by ``loss_scale``."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage, or the loss."""
        raise NotImplementedError

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients for the previous stage.

        Runs the whole backward, or its input gradients if the plan splits the microbatch's.
        """
        raise NotImplementedError

    def weight_gradients(self, microbatch: int) -> None:
        """Run the weight gradients of a split backward."""

    def bring_back(self, microbatch: int) -> None:
        """Begin to bring the stash of a microbatch back from the host, if it is there."""

    def end(self) -> None:
        """Check that every microbatch has had its backward, and end the iteration."""


class OperationObserver(Protocol):
    """Something to be done before and after each operation: pacing, announcing gradients."""

    def before(self, operation: Operation) -> None:
        """Prepare for an operation that runs next."""

    def after(self, operation: Operation) -> None:
        """Finish what belongs to an operation that has run."""
