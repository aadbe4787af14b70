"""Gradients of the exported step: which values receive one, and which can be deferred.

A deferrable operation computes its weight gradients later if a backward is split. The executor
splits backwards by this, and the trace counts the memory that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
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
    tree_leaves,
)


def nodes_with_gradient(exported: ExportedStep) -> frozenset[fx.Node]:
    """Return parameters and values that the backward from the loss reaches.

    Autograd decides this after a forward of fake tensors: nothing is computed or allocated. Values
    that require a gradient but reach the loss only detached, as an index or not at all are left
    out: torch leaves the gradient of such a parameter None.
    """
    runner = _Entrances(exported.module)
    inputs = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")]
    held = [*inputs, *map(exported.attribute, exported.graph.find_nodes(op="get_attr"))]
    # Meta tensors hold no data either, and cost a fraction of the time.
    is_meta = all(value.is_meta for value in held if isinstance(value, Tensor))
    with nullcontext() if is_meta else FakeTensorMode(), torch.enable_grad():
        runner.run(*map(like, inputs))
    reached = backward_from(runner.entered.pop(exported.graph.output_node()))
    entrances = reached | {id(step.variable) for step in reached if hasattr(step, "variable")}
    return frozenset(
        node
        for node, found in runner.entered.items()
        # A later write into a value gives it another entrance.
        if not entrances.isdisjoint(found | {*_entrances(runner.env[node])})
    )


def backward_from(entrances: Set[Any]) -> set[Any]:
    """Return the steps of a backward that starts at some of them."""
    reached, ahead = set[Any](), [step for step in entrances if isinstance(step, Node)]
    while ahead:
        step = ahead.pop()
        if step not in reached:
            reached.add(step)
            ahead += [after for after, _ in step.next_functions if after is not None]
    return reached


class FakeRunner(fx.Interpreter):
    """Runs a graph on separate tensors for parameters and buffers, which may be written into."""

    def __init__(self, module: fx.GraphModule, **settings: Any) -> None:
        super().__init__(module, **settings)
        self._fakes: dict[int, Tensor] = {}  # A tied parameter is one tensor.

    def fetch_attr(self, target: str) -> Any:
        """Return what stands for a parameter or buffer, and anything else itself."""
        value = super().fetch_attr(target)
        if isinstance(value, Tensor) and id(value) not in self._fakes:
            self._fakes[id(value)] = self.fake_of(target, value)
        return self._fakes.get(id(value), value)

    def fake_of(self, target: str, value: Tensor) -> Tensor:
        """Return a new tensor like the one of an attribute, without its data."""
        return like(value).requires_grad_(value.requires_grad)


class _Entrances(FakeRunner):
    """Records where the backward enters each value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.entered: dict[fx.Node, set[Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        self.entered[n] = {*_entrances(value)}
        return value


def _entrances(value: Any) -> Iterator[Any]:
    """Yield the steps of a backward behind a value; of a parameter its ``id``."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            yield tensor.grad_fn or id(tensor)


def like(value: Tensor) -> Tensor:
    """Return a new tensor of the same form, on the same device."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


_WRITES_BUFFERS_ONLY = frozenset(("aten::batch_norm", "aten::instance_norm"))
_ALL_AT_ONCE = frozenset(("aten::scaled_dot_product_attention", "pipeplan::custom_function"))
"""Operations whose backward computes all gradients at once; split, it would run twice."""


def trained_weights(module: fx.GraphModule) -> set[fx.Node]:
    """Return trained parameters and values computed only from them and constants.

    Values that anything writes into are left out, since a changing value has no single backward.
    """
    memory = memory_of(module.graph)
    changed = {memory.get(value) for node in module.graph.nodes for value in written_by(node)}
    weights, fixed = set[fx.Node](), set[fx.Node]()
    for node in module.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "get_attr":
            value = attribute_of(module, str(node.target))
            is_weight = isinstance(value, nn.Parameter) and value.requires_grad
        elif node.op != "call_function" or memory.get(node) in changed:
            continue
        elif all(operand in weights or operand in fixed for operand in operands):
            is_detached = node.target is torch.ops.aten.detach.default
            is_weight = not is_detached and not weights.isdisjoint(operands)
        else:
            continue
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
    if node in weights or weights.isdisjoint(node.all_input_nodes):
        return False
    name = schema_name(node.target)
    writes = bool(written_by(node)) and name not in _WRITES_BUFFERS_ONLY
    return not (writes or returns_alias(node.target) or name in _ALL_AT_ONCE)
