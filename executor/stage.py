"""One stage on one rank: forward and backward of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.cut import StageModule


@dataclass
class _InFlight:
    """What a microbatch keeps between forward and backward.

    Attributes:
        leaves: received tensors that take a gradient.
        roots: where the backward starts, in the order of the gradients it is given. Edges of the
            autograd graph do not hold the outputs: these are free once they have been sent.
        loss: of the last stage, detached.
    """

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]
    loss: Tensor | None


class StageRunner:
    """Runs forwards and backwards of one stage, holding what autograd needs in between.

    Gradients accumulate in the parameters' ``grad``: the mean over ``microbatches``.
    """

    def __init__(self, stage: StageModule, microbatches: int) -> None:
        self.stage = stage
        self.microbatches = microbatches
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, received: Sequence[Tensor], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the stage.

        Args:
            microbatch: its number.
            received: what the stage before sent.
            batch: the entries the stage reads, by name.

        Returns:
            Detached tensors for the next stage, or the detached scalar loss.
        """
        leaves = [
            tensor.detach().requires_grad_(boundary.requires_grad)
            for tensor, boundary in zip(received, self.stage.receives, strict=True)
        ]
        # Autograd forbids writing into a leaf, and a local neighbour may still hold the tensor.
        inputs = [
            leaf.clone() if boundary.name in self.stage.written else leaf
            for leaf, boundary in zip(leaves, self.stage.receives, strict=True)
        ]
        result = self.stage.module(*inputs, *(batch[name] for name in self.stage.model_inputs))
        outputs: tuple[Tensor, ...] = (result,) if self.stage.is_last else result
        detached = tuple(tensor.detach() for tensor in outputs)
        self._in_flight[microbatch] = _InFlight(
            leaves=tuple(leaf for leaf in leaves if leaf.requires_grad),
            roots=self._roots(outputs),
            loss=detached[0] if self.stage.is_last else None,
        )
        return detached

    def _roots(self, outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
        wanted = [True] if self.stage.is_last else [t.requires_grad for t in self.stage.sends]
        return tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, is_wanted in zip(outputs, wanted, strict=True)
            if is_wanted
        )

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the whole backward.

        Args:
            microbatch: whose forward has run.
            gradients: of the sent tensors that require one, in order; none for the last stage.

        Returns:
            Gradients of the received tensors that require one, in order. Zeros if none came this
            way: boundaries require one only if the loss reaches them
            (:func:`planner.tracing.gradients.nodes_with_gradient`), here or on another way, so
            that no parameter gets a gradient that plain torch would leave None.
        """
        kept = self._in_flight.pop(microbatch)
        if kept.loss is not None:
            gradients = [torch.full_like(kept.loss, 1.0 / self.microbatches)]
        pairs = [
            (root, gradient)
            for root, gradient in zip(kept.roots, gradients, strict=True)
            if root is not None
        ]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in kept.leaves
        )

    def require_empty(self) -> None:
        """Every forward of the iteration has had its backward."""
        assert not self._in_flight, f"microbatches left in flight: {sorted(self._in_flight)}"
