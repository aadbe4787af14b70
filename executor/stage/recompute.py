"""Recomputation: a layer keeps only what it reads and runs again in its backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The second run draws the random
numbers of the first and leaves no trace in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge

from executor.stage.random_numbers import RandomState
from executor.stage.statistics import Statistics
from planner.tracing.sharing import attribute_of

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class Recomputed:
    """A piece of a stage that runs again in its backward.

    Attributes:
        first: the piece as it runs in the forward, which needs no graph.
        again: as it runs in the backward; returns the same values.
        written: for each input, whether the piece writes into it; it gets a copy then.
        differentiable: for each value it returns, whether it takes a gradient.
        is_random: whether it draws random numbers.
        statistics: of the stage, if it has any; the second run leaves them alone.
        context: how operations run, from a random state or from where the generator is.
        device: whose random numbers are drawn.
        anchor: a leaf, so that there is a backward even if no input takes a gradient.
    """

    first: Run
    again: Run
    written: Sequence[bool]
    differentiable: Sequence[bool]
    is_random: bool
    statistics: Statistics | None
    context: Callable[[RandomState | None], AbstractContextManager[None]]
    device: torch.device
    anchor: Tensor = field(default_factory=partial(torch.zeros, (), requires_grad=True))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it; only the inputs are kept."""
        return _RunAgain.apply(self.anchor, self, *inputs)  # type: ignore[no-any-return,no-untyped-call]

    def own(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs, with copies of those that a run may write into."""
        return [
            x.clone() if is_written else x
            for x, is_written in zip(inputs, self.written, strict=True)
        ]


def differentiate(
    roots: Sequence[Tensor | GradientEdge | None], gradients: Sequence[Tensor | None]
) -> None:
    """Run the backward from those roots that a gradient has come for."""
    rows = zip(roots, gradients, strict=True)
    pairs = [(root, given) for root, given in rows if root is not None and given is not None]
    if pairs:
        started, given = zip(*pairs, strict=True)
        torch.autograd.backward(started, given)


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
        paused = nullcontext() if piece.statistics is None else piece.statistics.paused()
        with torch.enable_grad(), paused, piece.context(ctx.state):
            outputs = piece.again(*piece.own(leaves))
        differentiate([x if x.requires_grad else None for x in outputs], gradients)
        return (None, None, *(leaf.grad for leaf in leaves))


BeforeUse = Callable[[Sequence[str]], None]
"""Told the names (FQNs) of parameters that are about to be used; returns once they may be."""


class _Gate(nn.Module):
    """Stands before the first operation that uses some parameters."""

    def __init__(self, names: Sequence[str], before_use: BeforeUse) -> None:
        super().__init__()
        self.names = names
        self.before_use = before_use

    def forward(self) -> None:
        self.before_use(self.names)


def put_gates(
    module: fx.GraphModule, parameters: Mapping[str, nn.Parameter], before_use: BeforeUse
) -> None:
    """Put a gate before each operation that is the first to use a parameter that trains.

    Args:
        module: rewritten in place.
        parameters: of the stage, by the model's own names (FQNs).
        before_use: told the names.
    """
    name_of = {id(p): name for name, p in parameters.items() if p.requires_grad}
    passed: set[str] = set()
    for number, node in enumerate(list(module.graph.nodes)):
        used = [n for n in node.all_input_nodes if n.op == "get_attr"]
        found = [name_of.get(id(attribute_of(module, str(n.target)))) for n in used]
        names = [name for name in dict.fromkeys(found) if name and name not in passed]
        if names and node.op != "output":
            passed.update(names)
            module.add_module(f"gate_{number}", _Gate(names, before_use))
            with module.graph.inserting_before(node):
                module.graph.call_module(f"gate_{number}")
    module.recompile()
