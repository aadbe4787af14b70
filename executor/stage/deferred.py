"""Any operation with weights, whose weight gradients wait: autograd differentiates it twice.

The operation runs inside an autograd function of our own, which holds the operation's own small
graph. The backward asks that for the gradients of the data only and queues the rest; the weight
gradients are then taken of each queued operation by itself. So the split is exact whatever the
operation, and what only the input gradient needs is freed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.stage.waiting import Queue, Totals, add_gradients


class DeferredOperation(nn.Module):
    """One operation with its weights, called with the node's inputs in order.

    Args:
        node: the operation.
        weights: nodes of the parameters that train and of what is computed from them alone.
        queue: where its weight gradients wait.
    """

    def __init__(self, node: fx.Node, weights: set[fx.Node], queue: Queue) -> None:
        super().__init__()
        self.inputs = node.all_input_nodes
        self.call = _call_of(node)
        self.is_weight = [n in weights for n in self.inputs]
        self.queue = queue
        self.weight_places = [k for k, is_weight in enumerate(self.is_weight) if is_weight]
        self.data_places = [k for k, is_weight in enumerate(self.is_weight) if not is_weight]
        # A leaf of its own, so that the function has a backward even if no data takes a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, *inputs: Tensor) -> Any:
        """Run it so that its weight gradients wait in the queue."""
        if not torch.is_grad_enabled():
            return self.call(*inputs)
        data = [inputs[place] for place in self.data_places]
        weights = [inputs[place] for place in self.weight_places]
        return _Deferred.apply(self.anchor, self, weights, *data)  # type: ignore[no-untyped-call]

    def ordered(self, weights: Sequence[Tensor], data: Sequence[Tensor]) -> list[Tensor]:
        """Weights and data in the order of the node's inputs."""
        of_weights, of_data = iter(weights), iter(data)
        return [next(of_weights if is_weight else of_data) for is_weight in self.is_weight]


def _call_of(node: fx.Node) -> Callable[..., Any]:
    """The operation as a function of its inputs, in Python that fx writes once."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in node.all_input_nodes}
    graph.output(graph.node_copy(node, copies.__getitem__))
    found: Callable[..., Any] = fx.GraphModule(nn.Module(), graph).forward
    return found


@dataclass(frozen=True)
class _Waiting:
    """An operation's own graph, and the gradients of what it made."""

    weights: Sequence[Tensor]
    leaves: Sequence[Tensor]
    edges: Sequence[GradientEdge]
    gradients: Sequence[Tensor]

    def take(self, totals: Totals) -> None:
        """Let autograd differentiate it by its weights."""
        found = torch.autograd.grad(self.edges, self.leaves, self.gradients, allow_unused=True)
        add_gradients(self.weights, found, totals)


class _Deferred(torch.autograd.Function):
    """Runs an operation in a graph of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        operation: DeferredOperation,
        weights: list[Tensor],
        *data: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.weights = operation, weights
        ctx.data = [_leaf(x) for x in data]
        # A parameter is a leaf already: autograd is asked for its gradient and adds up nothing.
        ctx.leaves = [x if x.is_leaf else x.detach().requires_grad_() for x in weights]
        with torch.enable_grad():
            out = operation.call(*operation.ordered(ctx.leaves, ctx.data))
        outs = out if isinstance(out, tuple) else (out,)
        # Edges do not hold the outputs themselves.
        ctx.edges = [get_gradient_edge(x) if x.requires_grad else None for x in outs]
        results = tuple(x.detach() for x in outs)
        ctx.mark_non_differentiable(
            *(x for x, edge in zip(results, ctx.edges, strict=True) if edge is None)
        )
        return results if isinstance(out, tuple) else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(ctx.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        data = ctx.data
        results: list[Tensor | None] = [None] * len(data)
        if pairs:
            edges, given = zip(*pairs, strict=True)
            wanted = [x for x in data if x.requires_grad]
            if wanted:
                found = iter(
                    torch.autograd.grad(edges, wanted, given, retain_graph=True, allow_unused=True)
                )
                results = [next(found) if x.requires_grad else None for x in data]
            ctx.operation.queue.put(_Waiting(ctx.weights, ctx.leaves, edges, given))
        del ctx.data, ctx.leaves, ctx.edges, ctx.weights
        return (None, None, None, *results)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
