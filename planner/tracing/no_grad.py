"""Parts of a forward under ``torch.no_grad()``, as plain operations of the exported graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.tracing.sharing import attribute_of
from planner.tracing.torch_private import HigherOrderOperator

_REGION = "wrap_with_set_grad_enabled"
"""What export makes of a part in which gradients are switched: a call of a graph of its own."""


def inline_no_grad(module: fx.GraphModule) -> None:
    """Put the operations of parts under ``no_grad`` into the graph, so that they have layers.

    Their operands are detached where they are used, which keeps gradients out as ``no_grad`` does.
    Parts that have more than plain operations, such as one with gradients inside, stay as they are.
    """
    for node in list(module.graph.nodes):
        if _is_region(node) and node.args[0] is False:
            inner = attribute_of(module, str(node.args[1].target))
            assert isinstance(inner, fx.GraphModule)
            if _is_plain(inner):
                _inline(module, node, inner)
    module.graph.lint()
    module.recompile()


def _is_region(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == _REGION


def _is_plain(inner: fx.GraphModule) -> bool:
    """Return whether a part is operations on its operands, whose results are all tensors."""
    kinds = {"placeholder", "call_function", "output"}
    results: Any = inner.graph.output_node().args[0]
    return all(n.op in kinds and not _is_region(n) for n in inner.graph.nodes) and all(
        isinstance(value, fx.Node) for value in results
    )


def _inline(module: fx.GraphModule, region: fx.Node, inner: fx.GraphModule) -> None:
    graph, held = module.graph, region.args[1]
    taken: Any = region.args[2:]
    operands = dict(zip(inner.graph.find_nodes(op="placeholder"), taken, strict=True))
    copies: dict[fx.Node, fx.Node] = {}
    results: Any = inner.graph.output_node().args[0]
    with graph.inserting_before(region):
        for node in (row for row in inner.graph.nodes if row.op == "call_function"):
            used = {n: copies[n] for n in node.all_input_nodes if n in copies}
            used |= _detached(module, node, operands)
            copies[node] = graph.node_copy(node, used.__getitem__)
    for part in list(region.users):  # Its results are taken apart, one by one.
        number: Any = part.args[1]
        made = results[number]
        part.replace_all_uses_with(copies.get(made) or operands[made])
        graph.erase_node(part)
    graph.erase_node(region)
    assert isinstance(held, fx.Node)
    if not held.users:
        graph.erase_node(held)


def _detached(
    module: fx.GraphModule, node: fx.Node, operands: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the operands of an operation of the part, detached if they may take a gradient."""
    found = {}
    for inner in node.all_input_nodes:
        if (outer := operands.get(inner)) is None:
            continue
        found[inner] = outer
        if _may_take_gradient(module, outer):
            made = module.graph.call_function(torch.ops.aten.detach.default, (outer,))
            made.meta = {**node.meta, "val": outer.meta["val"].detach()}
            found[inner] = made
    return found


def _may_take_gradient(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = attribute_of(module, str(node.target))
        return isinstance(value, nn.Parameter) and value.requires_grad
    value = node.meta.get("val")
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return node.op == "call_function" and is_number
