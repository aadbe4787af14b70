"""Graphs of stages whose backward leaves weight gradients in a queue."""

from __future__ import annotations

import torch
from torch import fx

from executor.split.attention import CORE
from executor.stage.statistics import copied
from executor.stage.weight_gradients import DeferredLinear, DeferredOperation, HeldWeight, Queue
from planner.tracing.gradients import is_deferrable, trained_weights


def defer_weight_gradients(module: fx.GraphModule, queue: Queue) -> fx.GraphModule:
    """A copy of the module whose backward leaves weight gradients in ``queue``.

    Operations that cannot be taken apart (see
    :func:`planner.tracing.gradients.is_deferrable`), or that run again with the core of
    attention, keep the gradients of parameters in the backward itself. What is computed from
    parameters alone has its backward in the second half, whatever uses it.
    """
    deferred = copied(module)
    weights = trained_weights(deferred)
    parameters = {node for node in weights if node.op == "get_attr"}
    apart = [
        node
        for node in deferred.graph.nodes
        if CORE not in node.meta and is_deferrable(node, weights)
    ]
    _hold_gradients(deferred, weights, queue, set(apart))
    for number, node in enumerate(apart):
        name = f"deferred_{number}"
        kind = DeferredLinear if _is_linear(node, parameters) else DeferredOperation
        operation = kind(node, weights, queue)
        deferred.add_module(name, operation)
        with deferred.graph.inserting_before(node):
            call = deferred.graph.call_module(name, tuple(operation.inputs))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        deferred.graph.erase_node(node)
    deferred.recompile()
    return deferred


def _is_linear(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Return whether an operation is linear in a matrix and bias that are trained parameters.

    Args:
        node: the operation.
        parameters: nodes of parameters that train.
    """
    if node.target is not torch.ops.aten.linear.default or node.kwargs:
        return False
    rows, matrix, *bias = node.args
    wanted = [matrix, *(x for x in bias if x is not None)]
    is_real = isinstance(matrix, fx.Node) and not matrix.meta["val"].is_complex()
    return is_real and rows not in parameters and all(x in parameters for x in wanted)


def _hold_gradients(
    module: fx.GraphModule, weights: set[fx.Node], queue: Queue, deferred: set[fx.Node]
) -> None:
    """Stop the first half's gradients where a computed weight is used.

    Args:
        module: rewritten in place.
        weights: nodes of parameters that train and of what is computed from them alone.
        queue: where the gradients wait.
        deferred: uses that take their weights' gradients in the second half anyway.
    """
    ours = weights | deferred
    for number, node in enumerate(n for n in list(module.graph.nodes) if n in weights):
        others = [user for user in node.users if user not in ours]
        if node.op == "get_attr" or not others:
            continue
        module.add_module(f"held_{number}", HeldWeight(queue))
        with module.graph.inserting_after(node):
            held = module.graph.call_module(f"held_{number}", (node,))
        held.meta = dict(node.meta)
        for user in others:
            user.replace_input_with(node, held)
