"""Splitting the backward: input gradients now (I), weight gradients when the plan says (W).

Every operation that uses parameters is replaced by one that leaves its weight gradients in a queue.
Zero Bubble Pipeline Parallelism (Qi et al. 2023, section 2).
"""

from __future__ import annotations

from torch import fx, nn

from executor.stage.deferred import DeferredOperation
from executor.stage.deferred_linear import DeferredLinear, is_linear
from executor.stage.graphs import copied
from executor.stage.held import hold_gradients
from executor.stage.waiting import Queue
from planner.tracing.sharing import attribute_of, memory_of, written_by
from planner.tracing.torch_private import OpOverload, returns_alias, schema_name

_WRITES_BUFFERS_ONLY = frozenset(("aten::batch_norm", "aten::instance_norm"))


def defer_weight_gradients(module: fx.GraphModule, queue: Queue) -> fx.GraphModule:
    """A copy of the module whose backward leaves weight gradients in ``queue``.

    Operations it cannot take apart (those that write in place, or return a view of what they were
    given) keep the gradients of parameters in the backward itself. What is computed from parameters
    alone has its backward in the second half, whatever uses it.
    """
    deferred = copied(module)
    weights = _weights(deferred)
    parameters = {node for node in weights if node.op == "get_attr"}
    apart = [node for node in deferred.graph.nodes if _is_deferrable(node, weights)]
    hold_gradients(deferred, weights, queue, set(apart))
    for number, node in enumerate(apart):
        name = f"deferred_{number}"
        kind = DeferredLinear if is_linear(node, parameters) else DeferredOperation
        operation = kind(node, weights, queue)
        deferred.add_module(name, operation)
        with deferred.graph.inserting_before(node):
            call = deferred.graph.call_module(name, tuple(operation.inputs))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        deferred.graph.erase_node(node)
    deferred.recompile()
    return deferred


def _weights(module: fx.GraphModule) -> set[fx.Node]:
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


def _is_deferrable(node: fx.Node, weights: set[fx.Node]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node in weights or not any(n in weights for n in node.all_input_nodes):
        return False
    writes = bool(written_by(node)) and schema_name(node.target) not in _WRITES_BUFFERS_ONLY
    return not (writes or returns_alias(node.target))
