"""Gradients of the exported step: which values receive one, and which can be deferred.

A deferrable operation computes its weight gradients later if a backward is split. The executor
splits backwards by this, and the trace counts the memory that waits.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from planner.tracing.sharing import ExportedStep, attribute_of, memory_of, written_by
from planner.tracing.torch_private import (
    FakeTensorMode,
    OpOverload,
    returns_alias,
    schema_name,
)


def nodes_with_gradient(exported: ExportedStep) -> frozenset[fx.Node]:
    """Return parameters and values that the backward from the loss reaches.

    Autograd decides this after a forward of fake tensors: nothing is computed or allocated. Values
    that require a gradient but reach the loss only detached, as an index or not at all are left
    out: torch leaves the gradient of such a parameter None.
    """
    runner = _FakeRunner(exported)
    # Meta tensors hold no data either, and cost a fraction of the time.
    fake = nullcontext() if _is_on_meta(exported) else FakeTensorMode()
    with fake, torch.enable_grad():
        runner.run(*[_like(n.meta["val"]) for n in exported.graph.find_nodes(op="placeholder")])
        return runner.reached()


def _is_on_meta(exported: ExportedStep) -> bool:
    nodes = exported.graph.find_nodes(op="placeholder")
    held = map(exported.attribute, exported.graph.find_nodes(op="get_attr"))
    tensors = [*(n.meta["val"] for n in nodes), *(t for t in held if isinstance(t, Tensor))]
    return all(tensor.is_meta for tensor in tensors)


class _FakeRunner(fx.Interpreter):
    """Runs the graph and records where the backward enters each value."""

    def __init__(self, exported: ExportedStep) -> None:
        super().__init__(exported.module, garbage_collect_values=False)
        self.fakes: dict[int, Tensor] = {}  # A tied parameter is one tensor.
        self.entered: dict[fx.Node, set[Node]] = {}

    def fetch_attr(self, target: str) -> Any:
        """Return the parameter or buffer as a separate fake tensor, which may be written into."""
        value = super().fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.fakes:
            self.fakes[id(value)] = _like(value).requires_grad_(value.requires_grad)
        return self.fakes[id(value)]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; a later write into its value gives it another entrance."""
        value = super().run_node(n)
        self.entered[n] = _entrances(value)
        return value

    def reached(self) -> frozenset[fx.Node]:
        """Return the values that the backward of the graph's output enters."""
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
    # A parameter's is only seen in the backward. A view made under no_grad has none.
    view = value.view_as(value).grad_fn
    assert view is not None
    return {entrance for entrance, _ in view.next_functions if entrance is not None}


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


_WRITES_BUFFERS_ONLY = frozenset(("aten::batch_norm", "aten::instance_norm"))
_ALL_AT_ONCE = frozenset(("aten::scaled_dot_product_attention", "pipeplan::custom_function"))
"""Operations whose backward computes all gradients at once; split, it would run twice."""


def is_detached(node: fx.Node) -> bool:
    """Return whether no gradient passes an operation, which otherwise changes nothing."""
    return node.target is torch.ops.aten.detach.default


def trained_weights(module: fx.GraphModule) -> set[fx.Node]:
    """Return trained parameters and values computed only from them and constants.

    Values that anything writes into are left out, since a changing value has no single backward.
    """
    memory = memory_of(module.graph)
    changed = {memory.get(value) for node in module.graph.nodes for value in written_by(node)}
    weights: set[fx.Node] = set()
    fixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "call_function" and memory.get(node) in changed:
            continue
        if node.op == "get_attr":
            value = attribute_of(module, str(node.target))
            trains = isinstance(value, nn.Parameter) and value.requires_grad
            (weights if trains else fixed).add(node)
        elif node.op == "call_function" and all(n in weights | fixed for n in node.all_input_nodes):
            is_weight = not is_detached(node) and any(n in weights for n in node.all_input_nodes)
            (weights if is_weight else fixed).add(node)
    return weights


def is_deferrable(node: fx.Node, weights: Set[fx.Node]) -> bool:
    """Return whether an operation's weight gradients can wait.

    Operations that write in place, or return a view of an argument, cannot defer them; and
    attention computes those of a learned bias together with the gradients of its data.

    Args:
        node: the operation.
        weights: result of :func:`trained_weights`.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node in weights or not any(n in weights for n in node.all_input_nodes):
        return False
    name = schema_name(node.target)
    writes = bool(written_by(node)) and name not in _WRITES_BUFFERS_ONLY
    return not (writes or returns_alias(node.target) or name in _ALL_AT_ONCE)
