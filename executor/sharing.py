"""Which values of an exported graph may share memory, as in-place operations see it."""

from __future__ import annotations

import torch
from torch import fx

# Composite operators that nevertheless always return new memory. Other composites may hand on
# their argument: reshape, contiguous, to, dropout with nothing to drop.
_ALWAYS_NEW = frozenset(
    f"aten::{name}"
    for name in (
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
        *(f"{kind}_norm" for kind in ("batch", "layer", "group", "instance", "rms")),
        *("linear", "matmul", "scaled_dot_product_attention", "max_pool2d", "adaptive_avg_pool2d"),
    )
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


def sharing(node: fx.Node) -> set[fx.Node]:
    """All values that may share memory with ``node``, itself included."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        value = left.pop()
        if value in found:
            continue
        found.add(value)
        if _may_return_argument(value):
            left += value.all_input_nodes
        left += [user for user in value.users if _may_return_argument(user)]
    return found


def _may_return_argument(node: fx.Node) -> bool:
    """Whether the result may be an argument or a view of one."""
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if any(result.alias_info is not None for result in target._schema.returns):
        return True
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite and target._schema.name not in _ALWAYS_NEW
