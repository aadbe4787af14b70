"""Random numbers of split operations: every rank draws those of the whole value, and takes a share.

So a group drops what a single process drops, and the ranks' generators stay equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from planner.errors import PipeplanError
from planner.tracing.sharding.placements import Share
from planner.tracing.sharing import arguments_of, operator_name, shape_of
from planner.tracing.torch_private import MATH_ATTENTION

if TYPE_CHECKING:
    from planner.tracing.sharding.local import LocalStep

_aten = torch.ops.aten


def drawn_share(local: LocalStep, node: fx.Node, operand: Callable[[Any], fx.Node]) -> fx.Node:
    """Add a rank's share of an operation of the step that draws random numbers.

    ``operand`` gives the rank's form of an operand.

    Raises:
        PipeplanError: if the numbers of a share are not known to be part of the whole's.
    """
    name, given, share = operator_name(node), arguments_of(node), local.split.share_in(node, node)
    if share is not None and name == "dropout":
        kept = _kept(local, node, given["input"].meta["val"], given["p"])
        kept = local.take(node, kept, share)
        return local.function(node, _aten.mul.Tensor, operand(given["input"]), kept)
    if share is not None and name == "scaled_dot_product_attention":
        return _attention(local, node, share, operand)
    raise PipeplanError(
        f"layer {local.layer(node)!r}: {node.target} draws random numbers, and a tensor-parallel "
        "group would compute it in shares, whose numbers would not be those of a single process; "
        "use dropout there, or plan without tensor parallelism (without sequence parallelism, if "
        "it lies between the attention and the MLP)"
    )


def _attention(
    local: LocalStep, node: fx.Node, share: Share, operand: Callable[[Any], fx.Node]
) -> fx.Node:
    """Add attention whose weights are torch's own, as it computes them where it drops some."""
    given, sides = arguments_of(node), ("query", "key", "value", "attn_mask")
    query, key, value, mask = (operand(given[s]) if given[s] is not None else None for s in sides)
    if mask is not None and given["attn_mask"].meta["val"].dtype == torch.bool:
        mask = local.function(node, _aten.where.Scalar, mask, 0.0, -math.inf)
    none_of_value = local.function(node, _aten.slice.Tensor, value, -1, 0, 0)
    settings = {name: given[name] for name in ("scale", "enable_gqa")}
    both = local.function(
        node,
        MATH_ATTENTION,
        *(query, key, none_of_value, mask, 0.0, given["is_causal"]),
        **settings,
    )
    weights = local.function(node, operator.getitem, both, 1)
    shape = (*shape_of(node)[:-1], shape_of(given["key"])[-2])
    like = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    kept = local.take(node, _kept(local, node, like, given["dropout_p"]), share)
    weights = local.function(node, _aten.mul.Tensor, weights, kept)
    if given["enable_gqa"]:
        heads = shape_of(given["query"])[-3] // shape_of(given["value"])[-3]
        value = local.function(node, _aten.repeat_interleave.self_int, value, heads, -3)
    return local.function(node, _aten.matmul.default, weights, value)


def _kept(local: LocalStep, node: fx.Node, value: Tensor, rate: float) -> fx.Node:
    """Add the factors, 0 or 1 / (1 - rate), that dropout draws for a tensor like this one."""
    like = torch.empty_strided(value.shape, value.stride(), device="meta")
    strides = torch.empty_like(like).stride()
    order = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
    shape = [value.shape[dimension] for dimension in order]
    settings = {"dtype": value.dtype, "device": torch.device("cpu")}
    made = local.function(node, _aten.ones.default, shape, **settings)
    if order != sorted(order):  # Dropout draws in the order of memory.
        back = [order.index(dimension) for dimension in range(len(order))]
        made = local.function(node, _aten.permute.default, made, back)
    return local.function(node, _aten.dropout.default, made, rate, True)
