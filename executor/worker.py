"""What the step loop asks of a stage, whether it computes or only takes its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor that will come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


class Worker(Protocol):
    """One stage on this rank."""

    @property
    def is_last(self) -> bool:
        """Whether it makes the loss."""

    @property
    def incoming(self) -> Sequence[TensorSpec]:
        """What the stage before sends for each microbatch."""

    @property
    def returning(self) -> Sequence[TensorSpec]:
        """The gradients that the next stage sends back."""

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the next stage, or the loss."""

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before; of a split backward this is the first half."""

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""

    def require_empty(self) -> None:
        """Every microbatch of the iteration is through."""
