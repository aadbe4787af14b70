"""Which values of an exported graph share memory, for operations that write in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

# With nothing to drop these return their argument itself, but a copy while they are exported.
_MAY_RETURN_ARGUMENT = frozenset(
    f"aten::{name}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values an operation writes into; empty if it leaves its arguments as they are."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_position = node.args[position] if position < len(node.args) else None
            value = node.kwargs.get(argument.name, by_position)
            values = value if isinstance(value, list | tuple) else (value,)
            written += [value for value in values if isinstance(value, fx.Node)]
    return written


def memory_of(graph: fx.Graph) -> Mapping[fx.Node, int]:
    """A number for each tensor; two have the same number if they may share memory."""
    memory: dict[fx.Node, int] = {}
    same: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        storage = value.untyped_storage()._cdata
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _MAY_RETURN_ARGUMENT:
            same[storage] = memory[node.all_input_nodes[0]]
        memory[node] = same.get(storage, storage)
    return memory
