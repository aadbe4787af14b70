"""How many random numbers operations draw, so that a stage can go on behind those of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from executor.training.data import RandomState, seed_generator
from planner.tracing.sharing import attribute_of


def drawn_offset(nodes: Iterable[fx.Node], device: torch.device) -> int:
    """Return how far operations move the counter that is a GPU's generator.

    The counter depends on shapes and on the kind of GPU, and is the same for all microbatches.

    Args:
        nodes: that draw random numbers, of an exported graph, in order.
        device: a GPU; it runs each once, on tensors that it makes for that.
    """
    with RandomState.borrowed(RandomState.now(device)):
        seed_generator(device, 0)
        draw(nodes, device)
        return int(torch.cuda.default_generators[device.index or 0].get_offset())


@torch.no_grad()
def draw(nodes: Iterable[fx.Node], device: torch.device) -> None:
    """Run operations on tensors of ones, for what they draw alone.

    Args:
        nodes: of an exported graph; their inputs have shapes and types in ``meta``.
        device: that they run on.
    """

    def ones(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if node.op == "get_attr" and not isinstance(value, Tensor):
            return attribute_of(node.graph.owning_module, str(node.target))  # A graph of its own.
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.fill_(1)

    for node in nodes:
        assert callable(node.target)
        kwargs = dict(fx.node.map_arg(node.kwargs, ones))
        if kwargs.get("device") is not None:
            kwargs["device"] = device
        node.target(*fx.node.map_arg(node.args, ones), **kwargs)
