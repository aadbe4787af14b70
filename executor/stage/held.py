"""Computed weights that others than deferred operations use, say in place or through a view.

The backward of what is computed from parameters alone runs once, in the second half; the first half
would have used it up. So the gradient that such a use sends back waits like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.stage.waiting import Queue, Totals


def hold_gradients(
    module: fx.GraphModule, weights: set[fx.Node], queue: Queue, deferred: set[fx.Node]
) -> None:
    """Stop the first half's gradients where a computed weight is used.

    Args:
        module: rewritten in place.
        weights: nodes of parameters that train and of what is computed from them alone.
        queue: where the gradients wait.
        deferred: uses that take their weights' gradients in the second half anyway.
    """
    ours = weights | deferred
    for number, node in enumerate(n for n in list(module.graph.nodes) if n in weights):
        others = [user for user in node.users if user not in ours]
        if node.op == "get_attr" or not others:
            continue
        module.add_module(f"held_{number}", _Held(queue))
        with module.graph.inserting_after(node):
            held = module.graph.call_module(f"held_{number}", (node,))
        held.meta = dict(node.meta)
        for user in others:
            user.replace_input_with(node, held)


class _Held(nn.Module):
    """Hands a computed weight on; the gradient that comes back waits in the queue."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight itself, to whoever uses it."""
        if not torch.is_grad_enabled():
            return weight
        return _Hold.apply(self.anchor, self.queue, [weight])  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class _Waiting:
    """The gradient of a computed weight."""

    weight: Tensor
    gradient: Tensor

    def take(self, totals: Totals) -> None:
        """It goes on to the parameters with the others."""
        totals.add(self.weight, self.gradient)


class _Hold(torch.autograd.Function):
    # The weight comes in a list: as an argument it would be run through even without a gradient.
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, queue: Queue, weights: list[Tensor]) -> Tensor:
        ctx.queue, ctx.weights = queue, weights
        return weights[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.queue.put(_Waiting(ctx.weights[0], gradient))
        del ctx.weights
        return None, None, None
