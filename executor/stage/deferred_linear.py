"""``aten.linear`` whose weight gradients wait, by the formula: most of a transformer's work.

It needs no graph of its own, and the product of a weight gradient is added to the parameter's
``grad`` while it is computed (Megatron-LM's "gradient accumulation fusion"), so that there is no
second tensor of the weight's size. Where the formula does not apply, it is an operation like any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.stage.deferred import DeferredOperation
from executor.stage.waiting import Queue, Totals, add_gradient


def is_linear(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Whether an operation is a matrix, and a bias or none, that are all parameters in training.

    Args:
        node: the operation.
        parameters: nodes of parameters that train.
    """
    if node.target is not torch.ops.aten.linear.default or node.kwargs:
        return False
    rows, matrix, *bias = node.args
    wanted = [matrix, *(x for x in bias if x is not None)]
    is_real = isinstance(matrix, fx.Node) and not matrix.meta["val"].is_complex()
    return is_real and rows not in parameters and all(x in parameters for x in wanted)


class DeferredLinear(nn.Module):
    """A linear map called with the node's inputs in order: rows, matrix, and bias if it has one.

    Args:
        node: an operation that :func:`is_linear`.
        weights: as of :class:`executor.stage.deferred.DeferredOperation`.
        queue: where its weight gradients wait.
    """

    def __init__(self, node: fx.Node, weights: set[fx.Node], queue: Queue) -> None:
        super().__init__()
        self.general = DeferredOperation(node, weights, queue)
        self.inputs = self.general.inputs
        self.queue = queue
        self.anchor = self.general.anchor

    def forward(self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Any:
        """Run it so that its weight gradients wait in the queue."""
        # Autocast would compute in another type than the gradients are wanted in.
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(rows.device.type):
            given = (rows, matrix) if bias is None else (rows, matrix, bias)
            return self.general(*given)
        return _Linear.apply(self.anchor, self.queue, matrix, bias, rows)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Waiting:
    """What the weight gradients are computed from."""

    matrix: Tensor
    bias: Tensor | None
    rows: Tensor
    gradient: Tensor

    def take(self, totals: Totals) -> None:
        """Add the product of gradient and rows to the matrix's gradient, the sum to the bias's."""
        rows = self.rows.reshape(-1, self.rows.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        if self.matrix.grad is None:
            self.matrix.grad = gradient.t() @ rows
        else:
            self.matrix.grad.addmm_(gradient.t(), rows)
        totals.added(self.matrix)
        if self.bias is not None:
            add_gradient(self.bias, gradient.sum(0), totals)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, queue: Queue, matrix: Tensor, bias: Tensor | None, rows: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.queue, ctx.matrix, ctx.bias = queue, matrix, bias
        # Saved, so that torch notices if one is written before the backward.
        ctx.save_for_backward(rows, matrix)
        return nn.functional.linear(rows, matrix, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None, None
        rows, matrix = ctx.saved_tensors
        ctx.queue.put(_Waiting(ctx.matrix, ctx.bias, rows.detach(), gradient))
        of_rows = gradient @ matrix if ctx.needs_input_grad[4] else None
        return None, None, None, None, of_rows
