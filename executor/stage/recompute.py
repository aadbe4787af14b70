"""Recomputation: a layer keeps only what it reads and runs again in its backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The second run draws the random
numbers of the first and leaves no trace in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from executor.random_state import RandomState
from executor.stage.statistics import Statistics

Run = Callable[..., tuple[Tensor, ...]]


class Recomputed:
    """A piece of a stage that runs again in its backward.

    Args:
        first: the piece as it runs in the forward, which needs no graph.
        again: as it runs in the backward; returns the same values.
        written: for each input, whether the piece writes into it; it gets a copy then.
        differentiable: for each value it returns, whether it takes a gradient.
        is_random: whether it draws random numbers.
        statistics: of the stage; the second run leaves them alone.
        context: how operations run, from a random state or from where the generator is.
        device: whose random numbers are drawn.
    """

    def __init__(
        self,
        first: Run,
        again: Run,
        written: Sequence[bool],
        differentiable: Sequence[bool],
        is_random: bool,
        statistics: Statistics,
        context: Callable[[RandomState | None], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        self.first = first
        self.again = again
        self.written = written
        self.differentiable = differentiable
        self.is_random = is_random
        self.statistics = statistics
        self.context = context
        self.device = device
        # A leaf of its own, so that there is a backward even if no input takes a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it; only the inputs are kept."""
        return _RunAgain.apply(self.anchor, self, *inputs)  # type: ignore[no-any-return,no-untyped-call]

    def own(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What a run may write into."""
        return [
            x.clone() if is_written else x
            for x, is_written in zip(inputs, self.written, strict=True)
        ]


class _RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, piece: Recomputed, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.piece = piece
        ctx.state = RandomState.now(piece.device) if piece.is_random else None
        ctx.inputs = inputs
        outputs = piece.first(*piece.own(inputs))
        pairs = zip(outputs, piece.differentiable, strict=True)
        ctx.mark_non_differentiable(*(x for x, takes_gradient in pairs if not takes_gradient))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        piece, inputs = ctx.piece, ctx.inputs
        del ctx.inputs
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad(), piece.statistics.paused(), piece.context(ctx.state):
            outputs = piece.again(*piece.own(leaves))
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            started, given = zip(*pairs, strict=True)
            torch.autograd.backward(started, given)
        return (None, None, *(leaf.grad for leaf in leaves))
