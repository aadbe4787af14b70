"""One stage on one rank: forward and backward of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.cut import StageModule


@dataclass
class _InFlight:
    """What a microbatch keeps between forward and backward."""

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class StageRunner:
    """Runs forwards and backwards of one stage, holding what autograd needs in between.

    Gradients accumulate in the parameters' ``grad``: the mean over ``microbatches``.
    """

    def __init__(self, stage: StageModule, microbatches: int) -> None:
        self.stage = stage
        self.microbatches = microbatches
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the loss."""
        return not self.stage.sends

    def forward(
        self, microbatch: int, received: Sequence[Tensor], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the stage.

        Returns:
            Detached tensors for the next stage, or the detached scalar loss.
        """
        leaves = tuple(
            tensor.detach().requires_grad_(boundary.requires_grad)
            for tensor, boundary in zip(received, self.stage.receives, strict=True)
        )
        # Autograd forbids writing into a leaf, and a local neighbour still holds the tensor.
        inputs = [x.clone() for x in leaves] if self.stage.changes_in_place else leaves
        result = self.stage.module(*inputs, *(batch[name] for name in self.stage.model_inputs))
        outputs = result if isinstance(result, tuple) else (result,)
        self._in_flight[microbatch] = _InFlight(leaves, outputs)
        return tuple(tensor.detach() for tensor in outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the whole backward.

        Args:
            microbatch: whose forward has run.
            gradients: of the sent tensors that require one, in order; none for the last stage.

        Returns:
            Gradients of the received tensors that require one, in order.
        """
        kept = self._in_flight.pop(microbatch)
        roots = self._roots(kept)
        if self.is_last:
            gradients = [torch.full_like(kept.outputs[0], 1.0 / self.microbatches)]
        pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root.requires_grad]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for leaf in kept.leaves
            if leaf.requires_grad
        )

    def _roots(self, kept: _InFlight) -> list[Tensor]:
        if self.is_last:
            return [kept.outputs[0]]
        return [
            tensor
            for tensor, boundary in zip(kept.outputs, self.stage.sends, strict=True)
            if boundary.requires_grad
        ]

    def require_empty(self) -> None:
        """Every forward of the iteration has had its backward."""
        assert not self._in_flight, f"microbatches left in flight: {sorted(self._in_flight)}"
