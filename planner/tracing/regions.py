"""Regions of a forward under ``torch.no_grad()`` or a disabled autocast, as plain operations."""

from __future__ import annotations

from collections.abc import Mapping
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
        is_off = node.args[0] is False if name == _GRADIENTS else not _casts(node)
        if is_off and _is_plain(inner):
            _inline(module, node, inner, place, detaches=name == _GRADIENTS)
    module.graph.lint()
    module.recompile()


def _casts(region: fx.Node) -> bool:
    """Return whether autocast is on in a region, or around the step and so off in it alone."""
    return region.args[2] is not False or torch.is_autocast_enabled("cpu")


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
    graph, held = module.graph, region.args[place]
    taken: Any = region.args[place + 1 :]
    operands = dict(zip(inner.graph.find_nodes(op="placeholder"), taken, strict=True))
    copies: dict[fx.Node, fx.Node] = {}
    results: Any = inner.graph.output_node().args[0]
    with graph.inserting_before(region):
        for node in (row for row in inner.graph.nodes if row.op == "call_function"):
            used = {n: copies.get(n) or operands[n] for n in node.all_input_nodes}
            if detaches:
                used |= _detached(module, node, operands)
            copies[node] = graph.node_copy(node, used.__getitem__)
    for part in list(region.users):  # Its results are taken apart, one by one.
        number: Any = part.args[1]
        made = _written(results[number])
        part.replace_all_uses_with(copies.get(made) or operands[made])
        graph.erase_node(part)
    graph.erase_node(region)
    assert isinstance(held, fx.Node)
    if not held.users:
        graph.erase_node(held)


def _written(value: fx.Node) -> fx.Node:
    """Return what a write in place returns: the value it changed, which keeps its own gradient."""
    while value.op == "call_function" and returns_what_it_wrote(value):
        value = written_by(value)[0]
    return value


def _detached(
    module: fx.GraphModule, node: fx.Node, operands: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the operands of an operation of the region, detached if they may take a gradient."""
    found = {}
    for inner in node.all_input_nodes:
        outer = operands.get(inner)
        if outer is not None and _may_take_gradient(module, outer):
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
