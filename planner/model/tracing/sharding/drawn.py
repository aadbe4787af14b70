"""Random numbers of split operations: every rank draws those of the whole value, and takes a share.

So a group drops what a single process drops, and the ranks' generators stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from planner.errors import PipeplanError
from planner.model.tracing.sharding.axes import (
    Dimension,
    arguments_of,
    operator_name,
    shape_of,
)
from planner.model.tracing.sharding.dimensions import Parts

Take = Callable[[fx.Node, int, Parts], fx.Node]
"""Adds the operation that takes this rank's share of a whole value's dimension."""


@dataclass(frozen=True)
class DrawnShares:
    """Adds shares of operations that draw random numbers.

    Attributes:
        graph: of a rank.
        note: told of every operation that is added.
        take: adds a share of a value.
    """

    graph: fx.Graph
    note: Callable[[fx.Node], fx.Node]
    take: Take

    def share_of(
        self,
        node: fx.Node,
        layer: str,
        operand: Callable[[fx.Node], fx.Node],
        split: Mapping[Dimension, Parts],
    ) -> fx.Node:
        """Add a rank's share of an operation.

        Args:
            node: of the step.
            layer: its layer, for a message.
            operand: gives the rank's form of an operand.
            split: dimensions of its operands and result that are split.

        Raises:
            PipeplanError: if the numbers of a share are not known to be part of the whole's.
        """
        name, given = operator_name(node), arguments_of(node)
        own, parts = next(((d, parts) for (n, d), parts in split.items() if n is node), (-1, ()))
        if own >= 0 and name == "dropout":
            value = given["input"]
            kept = self._kept(_like(value.meta["val"]), given["p"])
            factors = operand(value), self.take(kept, own, parts)
            return self.graph.call_function(torch.ops.aten.mul.Tensor, factors)
        last = len(shape_of(node)) - 1
        if 0 <= own <= last and name == "scaled_dot_product_attention":
            weights = (*shape_of(node)[:-1], shape_of(given["key"])[-2])
            value = given["query"].meta["val"]
            whole = torch.empty(weights, dtype=value.dtype, device="meta")
            kept = self._kept(whole, given["dropout_p"])
            kept = kept if own == last else self.take(kept, own, parts)
            tensors = (given[key] for key in ("query", "key", "value", "attn_mask"))
            mine = [operand(x) if isinstance(x, fx.Node) else None for x in tensors]
            settings = (given["is_causal"], given["scale"], given["enable_gqa"])
            return self.graph.call_function(attention_with, (*mine, kept, *settings))
        raise PipeplanError(
            f"layer {layer!r}: {node.target} draws random numbers, and a tensor-parallel group "
            "would compute it in shares, whose numbers would not be those of a single process; "
            "use dropout there, or plan without tensor parallelism (without sequence parallelism, "
            "if it lies between the attention and the MLP)"
        )

    def _kept(self, whole: Tensor, rate: float) -> fx.Node:
        """Add the factors, 0 or 1 / (1 - rate), that dropout draws for a tensor like this one."""
        strides = torch.empty_like(whole, device="meta").stride()
        order = sorted(range(whole.dim()), key=lambda dimension: -strides[dimension])
        shape = [whole.shape[dimension] for dimension in order]
        settings: dict[str, Any] = {"dtype": whole.dtype, "device": torch.device("cpu")}
        aten = torch.ops.aten
        made = self.note(self.graph.call_function(aten.ones.default, (shape,), settings))
        if order != sorted(order):  # Dropout draws in the order of memory.
            back = [order.index(dimension) for dimension in range(len(order))]
            made = self.note(self.graph.call_function(aten.permute.default, (made, back)))
        return self.note(self.graph.call_function(aten.dropout.default, (made, rate, True)))


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def attention_with(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return attention whose weights are multiplied by ``kept``.

    As torch's ``scaled_dot_product_attention`` computes it where it drops weights on a CPU.
    """
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.tril().logical_not(), -math.inf)
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask
    return (functional.softmax(scores, -1) * kept) @ value
