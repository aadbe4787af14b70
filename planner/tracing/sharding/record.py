"""The record of a step's split: what is shared and what is communicated, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import ceil

from torch import Tensor, fx

from planner.model.figures import PHASES, Collective, CollectiveKind, Product, Work
from planner.model.graph_record import GraphRecord, Layer
from planner.model.split_record import (
    BoundarySplit,
    LayerSplit,
    SplitRecord,
    SplitRegion,
    most_loaded,
)
from planner.tracing.measure import is_batched, products_of
from planner.tracing.sharding.dimensions import DimensionClass
from planner.tracing.sharding.local import LocalStep
from planner.tracing.sharding.notation import OFFSETS
from planner.tracing.sharding.routing import Loads, load_of, require_whole_experts
from planner.tracing.sharding.split import Split, split_step, unsplit_parameters
from planner.tracing.sharing import bytes_of, operator_name, shape_of
from planner.tracing.trace import TracedStep, figures_of, gradient_sum, work_of

_KINDS: Mapping[str, tuple[CollectiveKind | None, ...]] = {
    "all_reduce": ("all_reduce",),
    "copy": (None, "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "gather": ("all_gather",),
    # Each member keeps its share for the backward.
    "gather_partial": ("all_gather", "reduce_scatter", "all_gather"),
    "scatter": (None, "all_gather"),
    "expert_counts": ("all_gather",),
    "send_rows": ("all_to_all", "all_to_all"),
    "return_rows": ("all_to_all", "all_to_all"),
    "cross_entropy_loss": ("all_reduce",),
}
"""Kinds of a method's collectives, by the phases of a layer."""


def record_of(
    step: TracedStep, degree: int, *, sequence: bool = False, experts: Loads | None = None
) -> SplitRecord:
    """Find how a traced step splits, and add it up layer by layer.

    Args:
        step: the step.
        degree: number of members.
        sequence: whether values between regions are shared by positions.
        experts: how many tokens experts get, of which members have whole ones; None: they have a
            share of each.

    Raises:
        PipeplanError: if whole experts cannot be given out.
    """
    is_whole = experts is not None
    split = split_step(step.exported, step.layers, degree, sequence=sequence, experts=is_whole)
    if experts is not None:
        require_whole_experts(split.dimensions.classes, step.layers, degree, experts)
    shares = _Shares(step, split, experts or ())
    return SplitRecord(
        degree=degree,
        sequence=sequence,
        regions=tuple(map(shares.region, split.regions)),
        layers=tuple(shares.layers()),
        boundaries=tuple(shares.boundaries()),
        summed_parameters=tuple(sorted(split.summed)),
        experts=is_whole,
        expert_load=experts or (),
    )


def with_splits(
    step: TracedStep, degrees: Iterable[int], *, sequence: bool, experts: Loads | None = None
) -> GraphRecord:
    """Return the layer graph of a step with its splits over groups; see :func:`record_of`."""
    found = (record_of(step, degree, sequence=sequence, experts=experts) for degree in degrees)
    return step.graph.model_copy(update={"splits": tuple(found)})


class _Shares:
    """What each member has a share of: values and work.

    Rows of experts are not equal shares: the member with the most decides, and has ``most`` times
    the mean. Of a figure w, all t members together have t times its own, ``most`` w, which is
    s + t (w - s) if s = w (t - most) / (t - 1) is shared.
    """

    def __init__(self, step: TracedStep, split: Split, loads: Loads) -> None:
        self.step, self.split, self.degree = step, split, split.degree
        self.layer_of = step.layers.layer_of
        self.shared = {**split.positions, **split.shares}
        regions = [region for region in split.regions if region.kind == "experts"]
        self.most = {
            node: most_loaded(load_of(loads, place), self.degree) if loads else Fraction(1)
            for place, region in enumerate(regions)
            for node in region.nodes.union(value for value, _ in region.parts)
            if operator_name(node) != OFFSETS
        }

    def region(self, region: DimensionClass) -> SplitRegion:
        """Return a region with its layers and parameters."""
        layers = {self.layer_of[node] for node in region.nodes}
        held = dict.fromkeys(self.step.exported.name_of(node) for node, _ in region.parts)
        return SplitRegion(
            kind=region.kind,
            layers=tuple(name for name in self.step.layers.names if name in layers),
            sizes=region.sizes,
            parameters=tuple(self.split.parameters[n] for n in held if n in self.split.parameters),
        )

    def boundaries(self) -> Iterator[BoundarySplit]:
        """Yield the placement of each tensor between layers."""
        for node, _, _ in self.step.layers.crossing_tensors():
            if not isinstance(node.meta["val"], Tensor):
                continue
            share = self.shared.get(node)
            yield BoundarySplit(
                name=node.name,
                placement="region"
                if node in self.split.shares
                else "positions"
                if share
                else "whole",
                dimension=share.dimension if share else None,
            )

    def layers(self) -> Iterator[LayerSplit]:
        """Yield what members have a share of, layer by layer."""
        measured, collectives = self.step.measured, self._collectives()
        stash, again = (
            self._held((row.nodes[0], key, row.bytes) for key, row in rows.items())
            for rows in (measured.saved, measured.again)
        )
        late = self._held(measured.weight_stash)
        sizes = {row.name: row.bytes for row in self.step.graph.parameters}
        unsplit, nodes_of = unsplit_parameters(self.split), self.step.layers.nodes_of
        for layer in self.step.graph.layers:
            nodes, own = nodes_of[layer.name], layer.parameters
            of_one, of_all = self._work(layer, nodes)
            yield LayerSplit(
                name=layer.name,
                regions=tuple(
                    place
                    for place, region in enumerate(self.split.regions)
                    if not region.nodes.isdisjoint(nodes)
                ),
                **figures_of(of_one),
                stash_bytes=stash[layer.name],
                weight_stash_bytes=late[layer.name],
                work=work_of(of_all),
                parameter_bytes=sum(sizes[name] for name in own if name in self.split.parameters),
                collectives=tuple(collectives[layer.name]),
                products=tuple(self._product(*row) for row in products_of(nodes)),
                unsplit={name: unsplit[name] for name in own if name in unsplit},
                again_bytes=again[layer.name],
            )

    def _of(self, node: fx.Node, figure: int, held: int = 0) -> int:
        """Return how much of a figure is shared, given what of it does not depend on rows."""
        if node not in self.most:
            return figure
        held = min(held, figure)
        even = Fraction(self.degree - self.most[node], self.degree - 1)
        return held + int((figure - held) * even)

    def _work(self, layer: Layer, nodes: Iterable[fx.Node]) -> tuple[list[Work], list[Work]]:
        """Return the work of a layer that is shared, and that of all members together."""
        of_one, of_all, others = list[Work](), list[Work](), self.degree - 1
        for row, flops, bytes_ in self._shared_rows(layer, nodes):
            of_one.append(row.model_copy(update={"flops": flops, "traffic_bytes": bytes_}))
            flops = self.degree * row.flops - others * flops
            bytes_ = self.degree * row.traffic_bytes - others * bytes_
            of_all.append(row.model_copy(update={"flops": flops, "traffic_bytes": bytes_}))
        return of_one, of_all

    def _shared_rows(
        self, layer: Layer, nodes: Iterable[fx.Node]
    ) -> Iterator[tuple[Work, int, int]]:
        """Yield the rows of a layer's work with the FLOPs and the traffic that are shared."""
        for node in nodes:
            # Matrices of experts are moved whatever the rows.
            operands = node.all_input_nodes if operator_name(node) == "grouped_product" else ()
            matrices = sum(bytes_of(n) for n in operands if len(shape_of(n)) > 2)
            for row in self.step.measured.work[node]:
                moved = self._of(node, row.traffic_bytes, matrices)
                is_shared = self.split.is_shared(node)
                yield row, is_shared * self._of(node, row.flops), is_shared * moved
        for parameter in self.step.graph.parameters:
            if parameter.trainable and parameter.bytes and parameter.name in layer.parameters:
                row = gradient_sum(parameter.bytes)
                yield row, 0, row.traffic_bytes * (parameter.name in self.split.parameters)

    def _product(self, node: fx.Node, product: Product) -> Product:
        """Return a product with what is split of it, and the rows of the most loaded member."""
        rows = round(product.rows * self.most.get(node, 1))
        return product.model_copy(update={"split": self._split_size(node), "rows": rows})

    def _split_size(self, node: fx.Node) -> str | None:
        if not self.split.is_shared(node):
            return None
        if node in self.split.positioned:
            return "rows"
        if node in self.split.sums:
            return "inner"
        behind = len(shape_of(node)) - self.split.shares[node].dimension
        return "columns" if behind == 1 else "batch" if is_batched(node) and behind > 2 else "rows"

    def _held(self, rows: Iterable[tuple[fx.Node, int | None, int]]) -> dict[str, int]:
        """Return what members have a share of among stored values, by layer.

        Args:
            rows: operation, storage (None: the gradient of its value) and bytes.
        """
        storage = self.step.measured.storage
        known = {*storage.values()}
        owners = {key: node for node, key in storage.items() if node in self.shared}
        held: dict[str, int] = defaultdict(int)
        for node, key, bytes_ in rows:
            if key in known:
                owner = owners.get(key)
            else:
                has_share = node in self.shared if key is None else self.split.is_shared(node)
                owner = node if has_share else None
            if owner is not None:
                held[self.layer_of[node]] += self._of(owner, bytes_)
        return held

    def _collectives(self) -> dict[str, list[Collective]]:
        """Return the collectives of each layer, as the local graph has them."""
        found: dict[str, list[Collective]] = defaultdict(list)
        for method, value, layer in LocalStep(self.step.exported, self.split).communicated:
            size = self._communicated_bytes(method, value)
            for phase, kind in zip(PHASES, _KINDS[method], strict=False):
                if kind and (phase == "forward" or value in self.split.gradients):
                    row = Collective(kind=kind, phase=phase, tensor=value.name, bytes=size)
                    # The highest logits, their sums, and the logits of the targets.
                    found[layer] += [row] * (3 if method == "cross_entropy_loss" else 1)
        return found

    def _communicated_bytes(self, method: str, value: fx.Node) -> int:
        if method in ("send_rows", "return_rows"):  # A member's rows, with those that stay.
            return ceil(bytes_of(value) * self.most[value] / self.degree)
        if method == "expert_counts":
            counts = [user for user in value.users if operator_name(user) == OFFSETS]
            return self.degree * sum(map(bytes_of, counts))
        return bytes_of(value) // (shape_of(value)[1] if method == "cross_entropy_loss" else 1)
