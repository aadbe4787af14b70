"""Regions of a forward under ``torch.no_grad()`` or a disabled autocast, as plain operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.tracing.sharing import attribute_of, returns_what_it_wrote, written_by
from planner.tracing.torch_private import HigherOrderOperator

_GRADIENTS, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
"""What export makes of such a region: a call of a graph, given behind the region's settings."""


def inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of regions into the graph, so that they have layers.

    Operands of a region without gradients are detached where they are used. A region with
    gradients inside one without, and autocast that is in use, stay as they are.

    Args:
        module: an exported step or, of a region in it, its graph.
    """
    for node in list(module.graph.nodes):
        name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
        place = {_GRADIENTS: 1, _AUTOCAST: 4}.get(name)
        if place is None:
            continue
        inner = attribute_of(module, str(node.args[place].target))
        assert isinstance(inner, fx.GraphModule)
        inline_regions(inner)
        # Autocast may be on in the region, or around the step and so off in it alone.
        casts = name == _AUTOCAST and (node.args[2] or torch.is_autocast_enabled("cpu"))
        is_off = node.args[0] is False if name == _GRADIENTS else not casts
        if is_off and _is_plain(inner):
            _inline(module, node, inner, place, detaches=name == _GRADIENTS)
    module.graph.lint()
    module.recompile()


def _is_plain(inner: fx.GraphModule) -> bool:
    """Return whether a region is operations on its operands, whose results are all tensors."""
    kinds = {"placeholder", "call_function", "output"}
    results: Any = inner.graph.output_node().args[0]
    return all(node.op in kinds for node in inner.graph.nodes) and all(
        isinstance(value, fx.Node) for value in results
    )


def _inline(
    module: fx.GraphModule, region: fx.Node, inner: fx.GraphModule, place: int, *, detaches: bool
) -> None:
    graph = module.graph
    held, *taken = region.args[place:]
    copies: dict[fx.Node, Any] = dict(
        zip(inner.graph.find_nodes(op="placeholder"), taken, strict=True)
    )
    with graph.inserting_before(region):
        for node in (row for row in inner.graph.nodes if row.op == "call_function"):
            used = {operand: copies[operand] for operand in node.all_input_nodes}
            for operand, value in used.items() if detaches else ():
                if operand.op == "placeholder" and _may_take_gradient(module, value):
                    made = graph.call_function(torch.ops.aten.detach.default, (value,))
                    made.meta = {**node.meta, "val": value.meta["val"].detach()}
                    used[operand] = made
            copies[node] = graph.node_copy(node, used.__getitem__)
    results: Any = inner.graph.output_node().args[0]
    for part in list(region.users):  # Its results are taken apart, one by one.
        result = results[part.args[1]]
        # A write in place returns the value it changed, which keeps its own gradient.
        while result.op == "call_function" and returns_what_it_wrote(result):
            result = written_by(result)[0]
        part.replace_all_uses_with(copies[result])
        graph.erase_node(part)
    graph.erase_node(region)
    assert isinstance(held, fx.Node)
    if not held.users:
        graph.erase_node(held)


def _may_take_gradient(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = attribute_of(module, str(node.target))
        return isinstance(value, nn.Parameter) and value.requires_grad
    value = node.meta.get("val")
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return node.op == "call_function" and is_number
