"""Which operations leave their weight gradients for later where a backward is split.

The executor splits backwards by this, the trace counts by it what waits.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx, nn

from planner.tracing.sharing import attribute_of, memory_of, written_by
from planner.tracing.torch_private import OpOverload, returns_alias, schema_name

_WRITES_BUFFERS_ONLY = frozenset(("aten::batch_norm", "aten::instance_norm"))
_ALL_AT_ONCE = frozenset(("aten::scaled_dot_product_attention",))
"""Operations whose backward makes every gradient from one computation: run apart, it runs twice."""


def trained_weights(module: fx.GraphModule) -> set[fx.Node]:
    """Parameters that train and what is computed from them and constants alone.

    Not what anything writes into: a value that changes has no single backward.
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
            is_weight = any(n in weights for n in node.all_input_nodes)
            (weights if is_weight else fixed).add(node)
    return weights


def is_deferrable(node: fx.Node, weights: Set[fx.Node]) -> bool:
    """Whether an operation's weight gradients can wait.

    Those of operations that write in place, or return a view of what they were given, cannot, and
    those of attention, such as of a learned bias, come with the gradients of its data.

    Args:
        node: the operation.
        weights: of :func:`trained_weights`.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node in weights or not any(n in weights for n in node.all_input_nodes):
        return False
    name = schema_name(node.target)
    writes = bool(written_by(node)) and name not in _WRITES_BUFFERS_ONLY
    return not (writes or returns_alias(node.target) or name in _ALL_AT_ONCE)
