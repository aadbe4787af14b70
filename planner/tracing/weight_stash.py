"""What a microbatch keeps between its input gradient and its weight gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from planner.tracing.deferral import is_deferrable, trained_weights
from planner.tracing.torch_private import tree_leaves


class WeightStash:
    """Notes what operations whose weight gradients wait keep: what they saved, and a gradient.

    Args:
        module: the training step.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        weights = trained_weights(module)
        self._waiting = {node for node in module.graph.nodes if is_deferrable(node, weights)}
        self._saved: dict[int, tuple[fx.Node, int]] = {}
        self._gradients: dict[fx.Node, int] = {}

    def saved(self, node: fx.Node, storage: int, bytes_: int) -> None:
        """An operation has kept a tensor for its backward."""
        if node in self._waiting:
            self._saved.setdefault(storage, (node, bytes_))

    def made(self, node: fx.Node, value: Any) -> None:
        """An operation has made a value, whose gradient it will be given."""
        if node in self._waiting:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            self._gradients[node] = sum(
                tensor.numel() * tensor.element_size() for tensor in tensors if tensor.requires_grad
            )

    def by_layer(self, layer_of: Mapping[fx.Node, str]) -> dict[str, int]:
        """Bytes of each layer, a tensor that several operations keep once."""
        found: dict[str, int] = defaultdict(int)
        for node, bytes_ in (*self._saved.values(), *self._gradients.items()):
            if node in layer_of:
                found[layer_of[node]] += bytes_
        return found
