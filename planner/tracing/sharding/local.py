"""The graph that each rank of a tensor-parallel group runs: local shapes, explicit collectives.

Its first input is ``group``; all other operations are those of the exported step on this rank's
shares, so that one graph runs on every rank. Methods of the group are differentiable:

================================  ======================================================
``all_reduce(value, fresh)``      sums partial sums, in place if nothing else reads them
``copy(value, fresh)``            sums partial gradients, in place if nothing else has them
``reduce_scatter(value, *place)`` returns this rank's share of a sum; gathers the gradient
``gather(value, *place, sums)``   joins shares; returns a share of the gradient, or of its sum
``scatter(value, *place)``        returns this rank's share of a whole value; gathers the gradient
``take(value, *place)``           the same of a value without gradient
``embedding``, ``cross_entropy``  rows of this rank, otherwise zero; loss of shares of classes
``own_rows``, ``own_sums``, …     rows of this rank's experts, of tokens that all ranks have
``send_rows``, ``return_rows``    rows to other ranks' experts and back, of each rank's tokens
================================  ======================================================

Rank r of t has the experts from r E / t on, E / t of them (Lepikhin et al., 2021, "GShard", section
3.2); two all-to-alls in each direction are Megatron-LM's ``alltoall`` dispatcher.

Of random numbers every rank draws those of the whole value and takes a share: a group drops what a
single process drops, and the ranks' generators stay equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PipeplanError
from planner.tracing.export import ExportedStep
from planner.tracing.measure import MATRIX_PRODUCTS
from planner.tracing.sharding.rules import (
    COMBINE,
    DISPATCH,
    OFFSETS,
    ROUTING,
    added_after,
    axes_of,
    operands_of,
)
from planner.tracing.sharding.split import RESHAPES, Share, Split
from planner.tracing.sharing import arguments_of, is_check, is_random, operator_name, shape_of
from planner.tracing.torch_private import MATH_ATTENTION

_aten = torch.ops.aten


def share(value: Tensor, dimension: int, parts: Sequence[int], degree: int, rank: int) -> Tensor:
    """Return a rank's share of a whole tensor: an equal share of each part of a dimension.

    Args:
        value: the tensor, such as a parameter.
        dimension: what is split.
        parts: sizes of its parts.
        degree: number of ranks, which divides every part.
        rank: 0 to degree - 1.
    """
    pieces = value.split([*parts], dimension)
    return torch.cat([piece.chunk(degree, dimension)[rank] for piece in pieces], dimension)


def join(shares: Sequence[Tensor], dimension: int, parts: Sequence[int]) -> Tensor:
    """Return the whole tensor of all ranks' shares; see :func:`share`."""
    local = [part // len(shares) for part in parts]
    rows = zip(*(value.split(local, dimension) for value in shares), strict=True)
    return torch.cat([piece for of_part in rows for piece in of_part], dimension)


class LocalStep:
    """A step's graph on one rank.

    Attributes:
        graph: its operations; parameters keep their names, and those in ``Split.parameters`` are a
            rank's :func:`share`.
        group: its first input.
        split: how the step splits.
        communicated: method of the group, value and layer of each collective, in order.
        made: value and layer of each operation: the value of the step that it makes, a part of it
            or communicates.

    Args:
        exported: the step.
        split: how it splits.

    Raises:
        PipeplanError: if an operation draws random numbers of which a share is not known.
    """

    def __init__(self, exported: ExportedStep, split: Split) -> None:
        self.graph = fx.Graph()
        self.group = self.graph.placeholder("group")
        self.communicated: list[tuple[str, fx.Node, str]] = []
        self.made: dict[fx.Node, tuple[fx.Node, str]] = {}
        self.split = split
        self._local: dict[fx.Node, fx.Node] = {}  # Values in the form in which they are made …
        self._once: dict[Any, fx.Node] = {}  # … and in others.
        for node in exported.graph.nodes:
            if not is_check(node):
                self._local[node] = self._note(self._copied(node), node)
        self._tell_what_is_fresh()

    def _copied(self, node: fx.Node) -> fx.Node:
        """Add an operation, a parameter, an input or the output."""
        if node.target is operator.getitem:
            return self.graph.node_copy(node, self._local.__getitem__)
        if self.split.is_shared(node):
            return self._share_of(node)
        return self.graph.node_copy(node, partial(self._read, node))

    def _tell_what_is_fresh(self) -> None:
        for node in self.graph.find_nodes(op="call_method", target="all_reduce"):
            value: Any = node.args[1]
            node.args = (*node.args, _is_product(value) and len(value.users) == 1)
        for node in self.graph.find_nodes(op="call_method", target="copy"):
            # What is added to a product has the product's own gradient.
            fresh = all(_is_product(user) and node not in added_after(user) for user in node.users)
            node.args = (*node.args, fresh)

    # --- additions to the graph ---

    def _function(self, node: fx.Node, target: Any, *arguments: Any, **settings: Any) -> fx.Node:
        """Add a call of a function for an operation of the step."""
        return self._note(self.graph.call_function(target, arguments, settings), node)

    def _take(
        self, whole: fx.Node, value: fx.Node, share: Share, layer: str | None = None
    ) -> fx.Node:
        """Add this rank's share of a whole value, which has the shape of one of the step."""
        return self._note(self._call("take", whole, *share.place(value)), value, layer)

    def _note(self, made: fx.Node, value: fx.Node, layer: str | None = None) -> fx.Node:
        self.made[made] = value, self._layer(value) if layer is None else layer
        return made

    def _layer(self, node: fx.Node) -> str:
        """Return the layer of an operation; outside layers, an empty name."""
        return self.split.layer_of.get(node, "")

    def _call(self, method: str, *arguments: Any) -> fx.Node:
        return self.graph.call_method(method, (self.group, *arguments))

    def _communicate(self, method: str, value: fx.Node, layer: str, *arguments: Any) -> fx.Node:
        self.communicated.append((method, value, layer))
        is_summed = (method == "gather_partial",) if "gather" in method else ()
        made = self._call(method.removesuffix("_partial"), *arguments, *is_summed)
        return self._note(made, value, layer)

    # --- values in the form in which they are read ---

    def _read(self, reader: fx.Node, value: fx.Node) -> fx.Node:
        """Return a value in the form in which an operation reads it."""
        form, held = self.split.read(reader, value), self.split.held(value)
        if form == "sum" or value in self.split.shares:
            return self._local[value]
        ready, key = self._held(value), (value, form, self._layer(reader))
        if key not in self._once and isinstance(held, Share) and form != held:
            method = "gather" if form == "whole" else "gather_partial"
            self._once[key] = self._communicate(method, value, key[2], ready, *held.place(value))
        has_gradient = value in self.split.gradients
        if key not in self._once and has_gradient and (held, form) == ("whole", "copied"):
            self._once[key] = self._communicate("copy", value, key[2], ready)
        return self._once.get(key, ready)

    def _held(self, value: fx.Node) -> fx.Node:
        """Return a value between regions: sums reduced, shares of positions where so placed."""
        form, made = self.split.held(value), self.split.made(value)
        if form == made:
            return self._local[value]
        if value not in self._once:
            place = form.place(value) if isinstance(form, Share) else ()
            method = "reduce_scatter" if place else "all_reduce"
            method, layer = method if made == "sum" else "scatter", self._layer(value)
            self._once[value] = self._communicate(method, value, layer, self._local[value], *place)
            if made == "sum":
                self._add_bias(value)
        return self._once[value]

    def _add_bias(self, value: fx.Node) -> None:
        products = [product for product, end in self.split.ends.items() if end is value]
        product = products[0] if products else value
        for bias in added_after(product) if product in self.split.region_of else ():
            terms = self._once[value], self._read(product, bias)
            self._once[value] = self._function(value, _aten.add.Tensor, *terms)

    # --- shares of operations ---

    def _share_of(self, node: fx.Node) -> fx.Node:
        """Add a rank's share of an operation."""
        region, layer = self.split.region_of.get(node), self._layer(node)
        has_experts = region is not None and region.kind == "experts"
        if region is not None and has_experts and operator_name(node) in ROUTING:
            return self._routed(node, layer, region.sizes[0])
        taken = self._taken(node)
        if has_experts and (taken or is_random(node)):
            raise PipeplanError(
                f"layer {layer!r}: {node.target} computes rows of experts with constants or "
                "random numbers of each row, whose shares are not known before the step; set "
                "expert_parallel = false"
            )

        def operand(value: fx.Node) -> fx.Node:
            if value not in taken:
                return self._read(node, value)
            return self._take(self._local[value], value, taken[value], layer)

        if is_random(node):
            return self._drawn(node, operand)
        return self._sum(node, operand) or self._resized(node, operand, has_experts)

    def _taken(self, node: fx.Node) -> dict[fx.Node, Share]:
        """Return operands that depend on no parameter and are split with the operation's."""
        found = {}
        for axis in axes_of(node) or ():
            shares = [(self.split.share_in(node, n), own) for n, own in axis.members]
            parts = [share.parts for share, own in shares if share and share.dimension == own]
            for value, own in axis.inputs if parts else ():
                if value not in self.split.dimensions.data:
                    found[value] = Share(own, parts[0])
        return found

    def _sum(self, node: fx.Node, operand: Callable[[Any], fx.Node]) -> fx.Node | None:
        """Add an operation that is another one where its result is a partial sum or a loss."""
        name, given, bias = operator_name(node), arguments_of(node), added_after(node)
        values = [value for value in operands_of(node) if value not in bias]
        if name == "cross_entropy_loss":
            self.communicated.append((name, values[0], self._layer(node)))
            settings = given["reduction"], given["ignore_index"]
            return self._call("cross_entropy", *map(operand, values), *settings)
        if node not in self.split.sums or not (bias or name == "embedding"):
            return None
        if name == "embedding":
            return self._call("embedding", *map(operand, values), given["padding_idx"])
        return self.graph.call_function(_WITHOUT_BIAS[name], (*map(operand, values),))

    def _routed(self, node: fx.Node, layer: str, experts: int) -> fx.Node:
        """Add an operation that sends tokens to this rank's experts or brings rows back."""
        name, given = operator_name(node), arguments_of(node)
        values = [self._read(node, value) for value in operands_of(node)]
        if node not in self.split.exchanged:
            own = {DISPATCH: "own_rows", OFFSETS: "own_offsets", COMBINE: "own_sums"}
            return self._call(own[name], *values, experts)
        chosen, key = given["chosen"], ("counts", given["chosen"], layer)
        if key not in self._once:
            counted = self._read(node, chosen), experts
            self._once[key] = self._communicate("expert_counts", chosen, layer, *counted)
        if name == OFFSETS:
            return self._call("received_offsets", self._once[key])
        method, rows = ("send_rows", node) if name == DISPATCH else ("return_rows", given["rows"])
        return self._communicate(method, rows, layer, *values, self._once[key])

    def _resized(
        self, node: fx.Node, operand: Callable[[Any], fx.Node], has_experts: bool
    ) -> fx.Node:
        """Copy an operation, and give one that names its result's shape the local one."""
        made, name = self.graph.node_copy(node, operand), operator_name(node)
        share, shape = self.split.share_in(node, node), [*shape_of(node)]
        if share is not None:
            # How many rows the experts of a rank have, only the step will say.
            size = shape[share.dimension] // self.split.degree
            shape[share.dimension] = -1 if has_experts else size
        if name in RESHAPES | {"expand", "unflatten"}:
            made.target = _aten.view.default if name == "unflatten" else node.target
            made.args = made.args[0], shape
        elif name in ("split", "split_with_sizes"):
            source, own = operands_of(node)[0], arguments_of(node)["dim"]
            share, own = self.split.share_in(node, source), own % len(shape_of(source))
            divisor = self.split.degree if share is not None and share.dimension == own else 1
            sizes = [tensor.shape[own] // divisor for tensor in node.meta["val"]]
            made.target, made.kwargs = _aten.split_with_sizes.default, {}
            made.args = made.args[0], sizes, own
        return made

    # --- random numbers ---

    def _drawn(self, node: fx.Node, operand: Callable[[Any], fx.Node]) -> fx.Node:
        """Add a rank's share of an operation that draws random numbers."""
        name, given, share = (
            operator_name(node),
            arguments_of(node),
            self.split.share_in(node, node),
        )
        if share is not None and name == "dropout":
            kept = self._take(self._kept(node, given["input"].meta["val"], given["p"]), node, share)
            return self._function(node, _aten.mul.Tensor, operand(given["input"]), kept)
        if share is not None and name == "scaled_dot_product_attention":
            return self._attention(node, share, operand)
        raise PipeplanError(
            f"layer {self._layer(node)!r}: {node.target} draws random numbers, and a "
            "tensor-parallel group would compute it in shares, whose numbers would not be those of "
            "a single process; use dropout there, or plan without tensor parallelism (without "
            "sequence parallelism, if it lies between the attention and the MLP)"
        )

    def _attention(self, node: fx.Node, share: Share, operand: Callable[[Any], fx.Node]) -> fx.Node:
        """Add attention whose weights are torch's own, as it computes them where it drops some."""
        given, sides, add = (
            arguments_of(node),
            ("query", "key", "value"),
            partial(self._function, node),
        )
        query, key, value = (operand(given[side]) for side in sides)
        mask = given["attn_mask"]
        if mask is not None:
            is_boolean, mask = mask.meta["val"].dtype == torch.bool, operand(mask)
            mask = add(_aten.where.Scalar, mask, 0.0, -math.inf) if is_boolean else mask
        none_of_value = add(_aten.slice.Tensor, value, -1, 0, 0)
        settings = {name: given[name] for name in ("scale", "enable_gqa")}
        arguments = (query, key, none_of_value, mask, 0.0, given["is_causal"])
        weights = add(operator.getitem, add(MATH_ATTENTION, *arguments, **settings), 1)
        shape = (*shape_of(node)[:-1], shape_of(given["key"])[-2])
        like = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
        kept = self._take(self._kept(node, like, given["dropout_p"]), node, share)
        weights = add(_aten.mul.Tensor, weights, kept)
        if given["enable_gqa"]:
            heads = shape_of(given["query"])[-3] // shape_of(given["value"])[-3]
            value = add(_aten.repeat_interleave.self_int, value, heads, -3)
        return add(_aten.matmul.default, weights, value)

    def _kept(self, node: fx.Node, value: Tensor, rate: float) -> fx.Node:
        """Add the factors, 0 or 1 / (1 - rate), that dropout draws for a tensor like this one."""
        like = torch.empty_strided(value.shape, value.stride(), device="meta")
        strides = torch.empty_like(like).stride()
        order = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
        shape = [value.shape[dimension] for dimension in order]
        settings = {"dtype": value.dtype, "device": torch.device("cpu")}
        made = self._function(node, _aten.ones.default, shape, **settings)
        if order != sorted(order):  # Dropout draws in the order of memory.
            back = [order.index(dimension) for dimension in range(len(order))]
            made = self._function(node, _aten.permute.default, made, back)
        return self._function(node, _aten.dropout.default, made, rate, True)


def _is_product(node: fx.Node) -> bool:
    """Return whether a result is a matrix product's own, and its gradients new tensors."""
    return node.op == "call_function" and operator_name(node) in MATRIX_PRODUCTS


_WITHOUT_BIAS = {
    "linear": _aten.linear.default,
    "addmm": _aten.mm.default,
    "baddbmm": _aten.bmm.default,
}
