"""Whether a model's output weights are those of its embedding."""

from __future__ import annotations

from planner.artifacts.blocks import BlockStack
from planner.artifacts.plan import Plan


def has_untied_head(plan: Plan, stack: BlockStack) -> bool:
    """Whether the last projection and the embedding have weights, and none in common.

    The last projection is the last layer behind the blocks that has weights and multiplies. A model
    without one, or a graph that names no parameters, says nothing about it.

    Args:
        plan: whose graph names each layer's parameters.
        stack: its blocks.
    """
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    after = [layers[name] for name in stack.after]
    heads = [layer for layer in after if layer.parameters and layer.forward_flops]
    embedding = {name for layer in stack.before for name in layers[layer].parameters}
    return bool(heads and embedding) and embedding.isdisjoint(
        name for layer in after for name in layer.parameters
    )
