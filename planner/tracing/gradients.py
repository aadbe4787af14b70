"""Which values of the exported step take a gradient from the loss."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from planner.tracing.export import ExportedStep
from planner.tracing.torch_private import FakeTensorMode


def nodes_with_gradient(exported: ExportedStep) -> frozenset[fx.Node]:
    """Parameters and values that the backward from the loss reaches.

    Autograd itself tells, after a forward of fake tensors: nothing is computed or allocated. What
    requires a gradient but reaches the loss only detached, as an index or not at all is left out:
    plain torch leaves the gradient of such a parameter None.
    """
    runner = _FakeRunner(exported)
    with FakeTensorMode(), torch.enable_grad():
        runner.run(*[_like(n.meta["val"]) for n in exported.graph.find_nodes(op="placeholder")])
        return runner.reached()


class _FakeRunner(fx.Interpreter):
    """Runs the graph and notes where the backward enters each value."""

    def __init__(self, exported: ExportedStep) -> None:
        super().__init__(exported.module, garbage_collect_values=False)
        self.fakes: dict[int, Tensor] = {}  # A tied parameter is one tensor.
        self.entered: dict[fx.Node, set[Node]] = {}

    def fetch_attr(self, target: str) -> Any:
        """The parameter or buffer as a fake of its own, which may be written into."""
        value = super().fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.fakes:
            self.fakes[id(value)] = _like(value).requires_grad_(value.requires_grad)
        return self.fakes[id(value)]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; writing into its value later on gives it another entrance."""
        value = super().run_node(n)
        self.entered[n] = _entrances(value)
        return value

    def reached(self) -> frozenset[fx.Node]:
        """The values that the backward of the graph's output enters."""
        output = next(n for n in self.entered if n.op == "output")
        seen: set[Node] = set()
        ahead = list(self.entered.pop(output))
        while ahead:
            step = ahead.pop()
            if step not in seen:
                seen.add(step)
                ahead += [after for after, _ in step.next_functions if after is not None]
        return frozenset(
            node
            for node, entrances in self.entered.items()
            if not seen.isdisjoint(entrances | _entrances(self.env[node]))
        )


def _entrances(value: Any) -> set[Node]:
    if isinstance(value, tuple | list):
        return {entrance for part in value for entrance in _entrances(part)}
    if not isinstance(value, Tensor) or not value.requires_grad:
        return set()
    if value.grad_fn is not None:
        return {value.grad_fn}
    # A parameter's is only seen from behind. A view made under no_grad has none.
    view = value.view_as(value).grad_fn
    assert view is not None
    return {entrance for entrance, _ in view.next_functions if entrance is not None}


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
