"""Splitting the backward: input gradients now (I), weight gradients when the plan says (W).

Every operation that uses parameters is replaced by one that leaves its weight gradients in a queue.
Zero Bubble Pipeline Parallelism (Qi et al. 2023, section 2).
"""

from __future__ import annotations

from torch import fx

from executor.stage.deferred import DeferredOperation
from executor.stage.deferred_linear import DeferredLinear, is_linear
from executor.stage.graphs import copied
from executor.stage.held import hold_gradients
from executor.stage.waiting import Queue
from planner.tracing.deferral import is_deferrable, trained_weights


def defer_weight_gradients(module: fx.GraphModule, queue: Queue) -> fx.GraphModule:
    """A copy of the module whose backward leaves weight gradients in ``queue``.

    Operations that cannot be taken apart (see :func:`planner.tracing.deferral.is_deferrable`) keep
    the gradients of parameters in the backward itself. What is computed from parameters alone has
    its backward in the second half, whatever uses it.
    """
    deferred = copied(module)
    weights = trained_weights(deferred)
    parameters = {node for node in weights if node.op == "get_attr"}
    apart = [node for node in deferred.graph.nodes if is_deferrable(node, weights)]
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
