"""The graph that each rank of a tensor-parallel group runs: local shapes, explicit collectives.

Its first input is ``group``, an object with the methods of :class:`MemberGroup`. All other
operations are those of the exported step on this rank's shares, so the same graph runs on every
rank.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from planner.errors import PipeplanError
from planner.model.tracing.sharding.axes import (
    Dimension,
    added_after,
    arguments_of,
    axes_of,
    operator_name,
    results_of,
    shape_of,
)
from planner.model.tracing.sharding.dimensions import Parts
from planner.model.tracing.sharding.drawn import DrawnShares
from planner.model.tracing.sharding.experts import ExpertGroup, RoutedShares
from planner.model.tracing.sharding.regions import is_routing
from planner.model.tracing.sharding.split import Split
from planner.tracing.export import ExportedStep
from planner.tracing.operators import MATRIX_PRODUCTS
from planner.tracing.sharing import is_random


class MemberGroup(ExpertGroup, Protocol):
    """Collectives of a group, each differentiable; in brackets what the backward does."""

    def all_reduce(self, value: Tensor, is_fresh: bool) -> Tensor:
        """Sum partial sums of all ranks [nothing].

        A fresh value is a product that nothing else reads: the sum may be taken in its place.
        """

    def copy(self, value: Tensor, is_fresh: bool) -> Tensor:
        """Return a whole value [sum its partial gradients].

        Fresh: only products read it, whose gradients of it nothing else has.
        """

    def reduce_scatter(self, value: Tensor, dimension: int, parts: tuple[int, ...]) -> Tensor:
        """Sum partial sums and return this rank's share [gather the gradients]."""

    def gather(
        self, value: Tensor, dimension: int, parts: tuple[int, ...], is_partial: bool
    ) -> Tensor:
        """Join the shares [return this rank's share of the gradient, or of its sum if partial]."""

    def scatter(self, value: Tensor, dimension: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's share of a whole value [gather the gradients]."""

    def take(self, value: Tensor, dimension: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's share of a value without gradient: its share of each part."""

    def embedding(self, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        """Look up the rows that this rank has, zero for others: a partial sum."""

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: int, ignored: int) -> Tensor:
        """Return the loss of logits, of which each rank has a share of the classes."""


def part_sizes(size: int, parts: Parts) -> tuple[int, ...]:
    """Return the sizes of a dimension's parts."""
    return tuple(int(size * part) for part in parts)


def share(value: Tensor, dimension: int, parts: tuple[int, ...], degree: int, rank: int) -> Tensor:
    """Return a rank's share of a whole tensor: an equal share of each part of a dimension.

    Args:
        value: the tensor, such as a parameter.
        dimension: what is split.
        parts: sizes of its parts.
        degree: number of ranks, which divides every part.
        rank: 0 to degree - 1.
    """
    pieces = value.split(parts, dimension)
    return torch.cat([piece.chunk(degree, dimension)[rank] for piece in pieces], dimension)


def join(shares: Sequence[Tensor], dimension: int, parts: tuple[int, ...]) -> Tensor:
    """Return the whole tensor of all ranks' shares; see :func:`share`."""
    local = [part // len(shares) for part in parts]
    rows = zip(*(value.split(local, dimension) for value in shares), strict=True)
    return torch.cat([piece for of_part in rows for piece in of_part], dimension)


def localise(exported: ExportedStep, split: Split, degree: int) -> fx.Graph:
    """Return the graph that each rank runs.

    Parameters keep their names; a rank gives its :func:`share` of those in ``split.parameters``.
    Gradients of ``split.placements.summed`` are to be summed over the group once a step.

    Args:
        exported: the step.
        split: how it splits at this degree.
        degree: number of ranks.
    """
    return Localiser(exported, split, degree).run()


class Localiser:
    """Copies a step's graph for one rank.

    Attributes:
        communicated: method of the group, value and layer of each collective, in order.
        made: value and layer of each operation of the graph: the value of the step that it makes,
            a part of it or communicates.
    """

    def __init__(self, exported: ExportedStep, split: Split, degree: int) -> None:
        self.exported, self.split, self.degree = exported, split, degree
        self.placements = split.placements
        self.graph = fx.Graph()
        self.group = self.graph.placeholder("group")
        self.local: dict[fx.Node, fx.Node] = {}  # In the form in which it is made …
        self.ready: dict[fx.Node, fx.Node] = {}  # … after a reduction or scatter …
        # … and as operations of a layer read it, with a gradient that is partial or not.
        self.read: dict[tuple[fx.Node, str, bool], fx.Node] = {}
        self.product_of = {end: product for product, end in self.placements.ends.items()}
        self.communicated: list[tuple[str, fx.Node, str]] = []
        self.made: dict[fx.Node, tuple[fx.Node, str]] = {}
        self.layer_of: Mapping[fx.Node, str] = split.layer_of
        self.routed = RoutedShares(self._call, self._communicate)

    def run(self) -> fx.Graph:
        """Copy the graph, operation by operation."""
        for node in self.exported.graph.nodes:
            if operator_name(node) == "_assert_tensor_metadata":
                continue
            if node.target is operator.getitem:
                self.local[node] = self.graph.node_copy(node, self.local.__getitem__)
            elif node in self.placements.region_of or node in self.placements.shared:
                self.local[node] = self._share_of(node)
            else:
                self.local[node] = self.graph.node_copy(node, partial(self._operand, node))
            self._note(self.local[node], node, self.layer_of.get(node, ""))
        self._tell_what_is_fresh()
        return self.graph

    def _tell_what_is_fresh(self) -> None:
        """Say of each sum whether it may be taken in the place of the partial sum."""
        for node in self.graph.find_nodes(op="call_method", target="all_reduce"):
            (group, value) = node.args
            node.args = (group, value, _is_product(value) and len(value.users) == 1)
        for node in self.graph.find_nodes(op="call_method", target="copy"):
            # What is added to a product has the product's own gradient.
            readers = list(node.users)
            fresh = all(_is_product(user) and node not in added_after(user) for user in readers)
            node.args = (*node.args, fresh)

    def _note(self, made: fx.Node, value: fx.Node, layer: str) -> fx.Node:
        self.made[made] = value, layer
        return made

    def _operand(self, reader: fx.Node, value: fx.Node) -> fx.Node:
        """Return an operand in the form in which an operation reads it."""
        found = self.placements
        if not found.reads_whole(reader, value):
            return self._ready(value) if reader in found.shared else self.local[value]
        layer, is_partial = self.layer_of.get(reader, ""), found.reads_partially(reader, value)
        if value in found.sequence:
            return self._once("gather", value, layer, is_partial, *self._place(value), is_partial)
        if is_partial and (value, layer) in found.copies:
            return self._once("copy", value, layer, is_partial)
        return self._ready(value)

    def _once(
        self, method: str, value: fx.Node, layer: str, is_partial: bool, *arguments: Any
    ) -> fx.Node:
        """Return the result of a collective, one for all readers of a layer."""
        key = value, layer, is_partial
        if key not in self.read:
            known = "gather_partial" if method == "gather" and is_partial else method
            self.communicated.append((known, value, layer))
            made = self._call(method, self._ready(value), *arguments)
            self.read[key] = self._note(made, value, layer)
        return self.read[key]

    def _place(self, value: fx.Node) -> tuple[int, tuple[int, ...]]:
        own, parts = self.placements.sequence[value]
        return own, part_sizes(shape_of(value)[own], parts)

    def _ready(self, value: fx.Node) -> fx.Node:
        """Return a value between regions: a sum reduced, and shares of positions if so placed."""
        found = self.placements
        if value in found.exchanged:
            return self.local[value]
        if value not in found.reduced and (value not in found.sequence or value in found.shared):
            return self.local[value]
        if value not in self.ready:
            place = self._place(value) if value in found.sequence else ()
            is_sum = value in found.reduced
            method = {
                (True, True): "reduce_scatter",
                (True, False): "all_reduce",
                (False, True): "scatter",
            }[is_sum, bool(place)]
            layer = self.layer_of.get(value, "")
            self.communicated.append((method, value, layer))
            made = self._note(self._call(method, self.local[value], *place), value, layer)
            product = self.product_of.get(value, value)
            for bias in added_after(product) if product in found.region_of and is_sum else ():
                add = torch.ops.aten.add.Tensor
                made = self.graph.call_function(add, (made, self._operand(product, bias)))
                self._note(made, value, layer)
            self.ready[value] = made
        return self.ready[value]

    def _call(self, method: str, *arguments: Any) -> fx.Node:
        return self.graph.call_method(method, (self.group, *arguments))

    def _share_of(self, node: fx.Node) -> fx.Node:
        """Add a rank's share of an operation."""
        region = self.placements.region_of.get(node)
        has_experts = region is not None and region.kind == "experts"
        if region is not None and has_experts and is_routing(node):
            return self._routed(node, *region.sizes)
        parts = region.parts if region is not None else self._positions(node)
        sums = region.sums if region is not None else frozenset()
        taken = self._constants(node, parts)
        if has_experts and (taken or is_random(node)):
            raise PipeplanError(
                f"layer {self.layer_of.get(node, '')!r}: {node.target} computes rows of experts "
                "with constants or random numbers of each row, whose shares are not known before "
                "the step; set expert_parallel = false"
            )

        def operand(value: Any) -> fx.Node:
            if value in taken:
                made = self._call("take", self.local[value], *taken[value])
                return self._note(made, value, self.layer_of.get(node, ""))
            return self._operand(node, value)

        name, given = operator_name(node), node.args
        if is_random(node):
            layer = self.layer_of.get(node, "")

            def note(made: fx.Node) -> fx.Node:
                return self._note(made, node, layer)

            def take(whole: fx.Node, own: int, parts: Parts) -> fx.Node:
                sizes = part_sizes(shape_of(node)[own], parts)
                return note(self._call("take", whole, own, sizes))

            return DrawnShares(self.graph, note, take).share_of(node, layer, operand, parts)
        if name == "embedding" and node in sums:
            padding = arguments_of(node)["padding_idx"]
            return self._call("embedding", operand(given[0]), operand(given[1]), padding)
        if name == "cross_entropy_loss":
            call = arguments_of(node)
            self.communicated.append((name, call["self"], self.layer_of[node]))
            return self._call(
                "cross_entropy",
                operand(call["self"]),
                operand(call["target"]),
                call["reduction"],
                call["ignore_index"],
            )
        if node in sums and added_after(node):
            product = [n for n in given if n not in added_after(node)]
            target = _WITHOUT_BIAS[name]
            return self.graph.call_function(target, tuple(operand(factor) for factor in product))
        made = self.graph.node_copy(node, operand)
        self._resize(made, node, parts, has_experts)
        return made

    def _routed(self, node: fx.Node, experts: int) -> fx.Node:
        """Add a rank's share of an operation that sends tokens to experts or brings rows back."""
        layer = self.layer_of[node]
        if node in self.placements.exchanged:
            return self.routed.exchanged(node, layer, self._ready, experts)
        return self.routed.own(node, partial(self._operand, node), experts)

    def _communicate(self, method: str, value: fx.Node, layer: str, *arguments: Any) -> fx.Node:
        self.communicated.append((method, value, layer))
        return self._note(self._call(method, *arguments), value, layer)

    def _positions(self, node: fx.Node) -> Mapping[Dimension, Parts]:
        """Return the split dimensions of an operation on shares of positions."""
        placed = self.placements.sequence
        values = (*node.all_input_nodes, *results_of(node).values())
        return {(n, placed[n][0]): placed[n][1] for n in values if n in placed}

    def _constants(
        self, node: fx.Node, split: Mapping[Dimension, Parts]
    ) -> dict[fx.Node, tuple[int, tuple[int, ...]]]:
        """Return operands that depend on no parameter and are split with the operation's."""
        found = {}
        for axis in axes_of(node) or ():
            members = (*axis.inputs, *axis.outputs)
            parts = next((split[m] for m in members if m in split), None)
            for value, own in axis.inputs if parts is not None else ():
                if value not in self.split.dimensions.data and shape_of(value)[own] > 1:
                    assert parts is not None
                    found[value] = own, part_sizes(shape_of(value)[own], parts)
        return found

    def _resize(
        self, made: fx.Node, node: fx.Node, split: Mapping[Dimension, Parts], is_uneven: bool
    ) -> None:
        """Give an operation that names its result's shape the local one.

        How many rows the experts of a rank have, only the step will say.
        """
        name, arguments = operator_name(node), list(made.args)
        shape = [
            (-1 if is_uneven else size // self.degree) if (node, own) in split else size
            for own, size in enumerate(shape_of(node))
        ]
        if name in ("view", "reshape", "_unsafe_view", "expand"):
            arguments[1] = shape
        elif name == "unflatten":
            own = int(arguments[1]) % len(shape_of(node.args[0]))  # type: ignore[arg-type]
            arguments[2] = shape[own : own + len(arguments[2])]  # type: ignore[arg-type]
        elif name in ("split", "split_with_sizes"):
            made.target = torch.ops.aten.split_with_sizes.default
            given = arguments_of(node)
            own = int(given["dim"]) % len(shape_of(given["self"]))
            divisor = self.degree if (given["self"], own) in split else 1
            arguments[1] = [tensor.shape[own] // divisor for tensor in node.meta["val"]]
        made.args = tuple(arguments)


def _is_product(node: fx.Node) -> bool:
    """Return whether a result is a matrix product's own, and its gradients new tensors."""
    return node.op == "call_function" and operator_name(node) in MATRIX_PRODUCTS


_WITHOUT_BIAS = {
    "linear": torch.ops.aten.linear.default,
    "addmm": torch.ops.aten.mm.default,
    "baddbmm": torch.ops.aten.bmm.default,
}
