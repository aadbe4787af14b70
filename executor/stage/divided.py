"""A layer whose weights replicas divide: it is whole only while it runs.

Its backward runs as a part of its own, so that weights are put together right before it and
gradients summed right after it (Zhao et al. 2023, "PyTorch FSDP", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from executor.stage.recompute import Run, differentiate


class LayerWeights(Protocol):
    """The weights of a layer, whole or in parts."""

    def gather(self) -> None:
        """Put the weights together."""

    def free(self) -> None:
        """Keep this rank's part alone."""

    def begin_backward(self) -> None:
        """Put the weights together, with room for their gradients."""

    def end_backward(self) -> None:
        """Sum the gradients over the ranks, and keep this rank's part of all."""


@dataclass(eq=False)
class Divided:
    """A layer whose weights are put together around its forward and its backward.

    Attributes:
        run: the layer as it runs with whole weights.
        weights: of the layer.
        written: for each input, whether the layer writes into it; it gets a copy then.
        differentiable: for each value it returns, whether it takes a gradient.
        anchor: a leaf, so that there is a backward even if no input takes a gradient.
    """

    run: Run
    weights: LayerWeights
    written: Sequence[bool]
    differentiable: Sequence[bool]
    anchor: Tensor = field(default_factory=partial(torch.zeros, (), requires_grad=True))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        return _RunDivided.apply(self.anchor, self, *inputs)  # type: ignore[no-any-return,no-untyped-call]


class _RunDivided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layer: Divided, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        layer.weights.gather()
        with torch.enable_grad():
            rows = zip(leaves, layer.written, strict=True)
            outputs = layer.run(*(x.clone() if is_written else x for x, is_written in rows))
        layer.weights.free()
        pairs = list(zip(outputs, layer.differentiable, strict=True))
        ctx.layer, ctx.leaves = layer, leaves
        # Edges of the autograd graph do not hold the outputs.
        ctx.roots = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        made = tuple(x.detach() for x in outputs)
        rows_made = zip(made, pairs, strict=True)
        ctx.mark_non_differentiable(*(x for x, (_, takes) in rows_made if not takes))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        layer, leaves = ctx.layer, ctx.leaves
        roots = ctx.roots
        del ctx.leaves, ctx.roots
        layer.weights.begin_backward()
        differentiate(roots, gradients)
        layer.weights.end_backward()
        return (None, None, *(leaf.grad for leaf in leaves))
