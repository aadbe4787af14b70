"""The graph that each rank of a tensor-parallel group runs: local shapes, explicit collectives.

Its first input is ``group``, an object with the methods of :class:`Group`. All other operations are
those of the exported step on this rank's shares, so the same graph runs on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from planner.model.tracing.export import ExportedStep
from planner.model.tracing.sharding.axes import (
    Dimension,
    added_after,
    arguments_of,
    axes_of,
    operator_name,
    shape_of,
)
from planner.model.tracing.sharding.dimensions import Parts
from planner.model.tracing.sharding.regions import Region
from planner.model.tracing.sharding.split import Split


class Group(Protocol):
    """Collectives of a group, each differentiable; in brackets what the backward does."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum partial sums of all ranks [nothing]."""

    def copy(self, value: Tensor) -> Tensor:
        """Return a whole value [sum its partial gradients]."""

    def take(self, value: Tensor, dimension: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's share of a value without gradient: its share of each part."""

    def embedding(self, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        """Look up the rows that this rank has, zero for others: a partial sum."""

    def cross_entropy(
        self, logits: Tensor, target: Tensor, reduction: int, ignored: int
    ) -> Tensor:
        """Return the loss of logits, of which each rank has a share of the classes."""


def part_sizes(size: int, parts: Parts) -> tuple[int, ...]:
    """Return the sizes of a dimension's parts."""
    return tuple(int(size * part) for part in parts)


def share(
    value: Tensor, dimension: int, parts: tuple[int, ...], degree: int, rank: int
) -> Tensor:
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


def localise(exported: ExportedStep, split: Split, degree: int) -> fx.Graph:
    """Return the graph that each rank runs.

    Parameters keep their names; a rank gives its :func:`share` of those in ``split.parameters``.
    Gradients of ``split.placements.summed`` are to be summed over the group once a step.

    Args:
        exported: the step.
        split: how it splits at this degree.
        degree: number of ranks.
    """
    return _Localiser(exported, split, degree).run()


class _Localiser:
    def __init__(self, exported: ExportedStep, split: Split, degree: int) -> None:
        self.exported, self.split, self.degree = exported, split, degree
        self.placements = split.placements
        self.graph = fx.Graph()
        self.group = self.graph.placeholder("group")
        self.local: dict[fx.Node, fx.Node] = {}  # In the form in which it is made …
        self.whole: dict[fx.Node, fx.Node] = {}  # … after a reduction …
        self.read: dict[tuple[fx.Node, str], fx.Node] = {}  # … and with a summed gradient.
        self.layer_of: Mapping[fx.Node, str] = split.layer_of

    def run(self) -> fx.Graph:
        """Copy the graph, operation by operation."""
        for node in self.exported.graph.nodes:
            if operator_name(node) == "_assert_tensor_metadata":
                continue
            region = self.placements.region_of.get(node)
            if region is None:
                made = self.graph.node_copy(node, lambda value, n=node: self._operand(n, value))
                if node in self.placements.sums:
                    self._resize(made, node)
            else:
                made = self._share_of(node, region)
            self.local[node] = made
        return self.graph

    def _operand(self, reader: fx.Node, value: fx.Node) -> fx.Node:
        """Return an operand in the form in which an operation reads it."""
        found = self.placements
        if not found.reads_whole(reader, value):
            return self.local[value]
        layer = self.layer_of.get(reader, "")
        is_summed = (value, layer) in found.copies and found.reads_partially(reader, value)
        form = self._whole(value)
        if not is_summed:
            return form
        if (value, layer) not in self.read:
            self.read[value, layer] = self._call("copy", form)
        return self.read[value, layer]

    def _whole(self, value: fx.Node) -> fx.Node:
        if value not in self.placements.reduced:
            return self.local[value]
        if value not in self.whole:
            reduced = self._call("all_reduce", self.local[value])
            for bias in added_after(value) if value in self.placements.region_of else ():
                reduced = self.graph.call_function(
                    torch.ops.aten.add.Tensor, (reduced, self._whole(bias))
                )
            self.whole[value] = reduced
        return self.whole[value]

    def _call(self, method: str, *arguments: Any) -> fx.Node:
        return self.graph.call_method(method, (self.group, *arguments))

    def _share_of(self, node: fx.Node, region: Region) -> fx.Node:
        """Add a rank's share of an operation."""
        taken = self._constants(node, region)

        def operand(value: fx.Node) -> fx.Node:
            if value in taken:
                own, parts = taken[value]
                return self._call("take", self.local[value], own, parts)
            return self._operand(node, value)

        name, given = operator_name(node), node.args
        if name == "embedding" and node in region.sums:
            padding = arguments_of(node)["padding_idx"]
            return self._call("embedding", operand(given[0]), operand(given[1]), padding)
        if name == "cross_entropy_loss":
            call = arguments_of(node)
            return self._call(
                "cross_entropy",
                operand(call["self"]),
                operand(call["target"]),
                call["reduction"],
                call["ignore_index"],
            )
        if node in region.sums and added_after(node):
            product = [n for n in given if n not in added_after(node)]
            target = _WITHOUT_BIAS[name]
            return self.graph.call_function(target, tuple(map(operand, product)))
        made = self.graph.node_copy(node, operand)
        self._resize(made, node)
        return made

    def _constants(
        self, node: fx.Node, region: Region
    ) -> dict[fx.Node, tuple[int, tuple[int, ...]]]:
        """Return operands that depend on no parameter and are split with the operation's."""
        found = {}
        for axis in axes_of(node) or ():
            members = (*axis.inputs, *axis.outputs)
            parts = next((region.parts[m] for m in members if m in region.parts), None)
            for value, own in axis.inputs if parts is not None else ():
                if value not in self.split.dimensions.data and shape_of(value)[own] > 1:
                    assert parts is not None
                    found[value] = own, part_sizes(shape_of(value)[own], parts)
        return found

    def _resize(self, made: fx.Node, node: fx.Node) -> None:
        """Give an operation that names its result's shape the local one."""
        name, shape = operator_name(node), self._local_shape(node)
        arguments = list(made.args)
        if name in ("view", "reshape", "_unsafe_view", "expand"):
            arguments[1] = list(shape)
        elif name == "unflatten":
            own = int(arguments[1]) % len(shape_of(node.args[0]))  # type: ignore[arg-type]
            arguments[2] = list(shape[own : own + len(arguments[2])])  # type: ignore[arg-type]
        elif name in ("split", "split_with_sizes"):
            arguments[1] = self._local_pieces(node)
        made.args = tuple(arguments)

    def _local_shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = list(shape_of(node))
        region = self.placements.region_of.get(node)
        if region is not None and (found := region.split_dimension(node)) is not None:
            shape[found[0]] //= self.degree
        return tuple(shape)

    def _local_pieces(self, node: fx.Node) -> list[int]:
        """Return the sizes into which a rank divides its share."""
        given = arguments_of(node)
        own = int(given["dim"]) % len(shape_of(given["self"]))
        region = self.placements.region_of[node]
        divisor = self.degree if (given["self"], own) in region.parts else 1
        return [tensor.shape[own] // divisor for tensor in node.meta["val"]]


_WITHOUT_BIAS = {
    "linear": torch.ops.aten.linear.default,
    "addmm": torch.ops.aten.mm.default,
    "baddbmm": torch.ops.aten.bmm.default,
}
