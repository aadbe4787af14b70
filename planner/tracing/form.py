"""The form of a tensor, for checks and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """A dtype and a shape; as text such as ``float32 [2, 3]``."""

    dtype: torch.dtype
    shape: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """That of a tensor."""
        return cls(tensor.dtype, tensor.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
