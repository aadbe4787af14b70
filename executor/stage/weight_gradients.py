"""Weight gradients that wait: an input gradient (I) leaves them, a weight gradient (W) takes them.

Zero Bubble Pipeline Parallelism (Qi et al. 2023, section 2). Operations that use parameters are
replaced (:mod:`executor.stage.deferred`) by those below, which put their weight gradients in
a queue:

- ``aten.linear``, most of a transformer's work, by the formula. It needs no graph of its own, and
  the product is added to the parameter's ``grad`` while it is computed (Megatron-LM's "gradient
  accumulation fusion"), so that there is no second tensor of the weight's size.
- Any other operation runs inside an autograd function of our own, which holds the operation's own
  small graph. The backward asks that for the gradients of the data only; the weight gradients are
  taken of each queued operation by itself. So the split is exact whatever the operation, and what
  only the input gradient needs is freed with it.
- Weights computed from parameters alone, such as a transposed one, have their backward once, with
  the weight gradients: gradients that other uses of them send back, say through a view, wait too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.stage.gradient_types import gradient_type

Added = Callable[[Tensor], None]
"""Called with each parameter whose gradient something other than autograd has added to."""


def ignore(parameter: Tensor) -> None:
    """Do nothing, where no one waits for gradients."""


@dataclass
class Totals:
    """Gradients of what is computed from parameters alone, such as a transposed one.

    Attributes:
        added: told of each parameter whose gradient something other than autograd has added to.
    """

    added: Added
    _found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """One more gradient of a computed weight."""
        before = self._found.get(id(weight))
        total = gradient if before is None else before[1] + gradient
        self._found[id(weight)] = (weight, total)

    def hand_on(self) -> None:
        """Run the backward to the parameters that the weights were computed from."""
        if self._found:
            weights, gradients = zip(*self._found.values(), strict=True)
            torch.autograd.backward(weights, gradients)


class Waiting(Protocol):
    """An operation whose weight gradients are still to be taken."""

    def take(self, totals: Totals) -> None:
        """Add them to the parameters' ``grad``, or to the totals of computed weights."""


Queue = list[Waiting]
"""What the backward that runs now leaves to do: weight gradients, in its order."""


def take_all(waiting: Queue, added: Added) -> None:
    """Take the weight gradients that one microbatch's input gradient has left to do.

    Args:
        waiting: emptied; each lets go of what it holds.
        added: see :class:`Totals`.
    """
    totals = Totals(added)
    waiting.reverse()
    while waiting:
        waiting.pop().take(totals)
    totals.hand_on()


def add_gradients(
    weights: Sequence[Tensor], gradients: Sequence[Tensor | None], totals: Totals
) -> None:
    """Add gradients to parameters, or to the totals of computed weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if weight.grad_fn is None:
            add_gradient(weight, gradient, totals)
        else:
            totals.add(weight, gradient)


def add_gradient(parameter: Tensor, gradient: Tensor, totals: Totals) -> None:
    """Add to a parameter's ``grad``."""
    if parameter.grad is None:
        # A tensor of its own: autograd may hand out one that others still need, or an expanded one.
        parameter.grad = torch.empty_like(parameter, dtype=gradient_type(parameter)).copy_(gradient)
    else:
        parameter.grad.add_(gradient)
    totals.added(parameter)


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
class _WaitingOperation:
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
            ctx.operation.queue.append(_WaitingOperation(ctx.weights, ctx.leaves, edges, given))
        del ctx.data, ctx.leaves, ctx.edges, ctx.weights
        return (None, None, None, *results)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


class DeferredLinear(nn.Module):
    """A linear map called with the node's inputs in order: rows, matrix, and bias if it has one.

    Args:
        node: an operation that :func:`is_linear`.
        weights: as of :class:`DeferredOperation`.
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
class _WaitingLinear:
    """The tensors that the weight gradients are computed from."""

    matrix: Tensor
    bias: Tensor | None
    rows: Tensor
    gradient: Tensor

    def take(self, totals: Totals) -> None:
        """Add the product of gradient and rows to the matrix's gradient, the sum to the bias's."""
        rows = self.rows.reshape(-1, self.rows.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        if gradient_type(self.matrix) != rows.dtype:  # A product is of the type of its factors.
            add_gradient(self.matrix, gradient.t() @ rows, totals)
        else:
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
        ctx.queue.append(_WaitingLinear(ctx.matrix, ctx.bias, rows.detach(), gradient))
        of_rows = gradient @ matrix if ctx.needs_input_grad[4] else None
        return None, None, None, None, of_rows


class HeldWeight(nn.Module):
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
class _WaitingGradient:
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
        ctx.queue.append(_WaitingGradient(ctx.weights[0], gradient))
        del ctx.weights
        return None, None, None
