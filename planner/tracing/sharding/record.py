"""The record of a step's split: what is shared and what is communicated, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from torch import Tensor, fx
from torch.distributed.tensor.parallel import SequenceParallel

from planner.model.figures import PHASES, Collective, CollectiveKind, Phase, Product
from planner.model.graph_record import GraphRecord, Layer
from planner.model.split_record import (
    BoundarySplit,
    LayerSplit,
    SplitParameter,
    SplitRecord,
    SplitRegion,
)
from planner.tracing.measure import OperationCost
from planner.tracing.products import is_batched, products_of
from planner.tracing.sharding.local import LocalStep
from planner.tracing.sharding.notation import OFFSETS
from planner.tracing.sharding.placing import bytes_of
from planner.tracing.sharding.routing import ExpertRouting
from planner.tracing.sharding.split import Split, split_step, wanted_by
from planner.tracing.sharing import operator_name, shape_of
from planner.tracing.trace import TracedStep, gradient_sum, work_of

_ROWS: Sequence[tuple[Phase, CollectiveKind]] = [
    ("forward", "all_to_all"),
    ("input_gradient", "all_to_all"),
]
_KINDS: Mapping[str, Sequence[tuple[Phase, CollectiveKind]]] = {
    "all_reduce": [("forward", "all_reduce")],
    "copy": [("input_gradient", "all_reduce")],
    "reduce_scatter": [("forward", "reduce_scatter"), ("input_gradient", "all_gather")],
    "gather": [("forward", "all_gather")],
    # Each member keeps its share for the backward.
    "gather_partial": [
        ("forward", "all_gather"),
        ("input_gradient", "reduce_scatter"),
        ("weight_gradient", "all_gather"),
    ],
    "scatter": [("input_gradient", "all_gather")],
    "expert_counts": [("forward", "all_gather")],
    "send_rows": _ROWS,
    "return_rows": _ROWS,
    # The highest logits, their sums, and the logits of the targets.
    "cross_entropy_loss": [("forward", "all_reduce")] * 3,
}
_WORK = tuple(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes"))


def record_of(
    step: TracedStep,
    degree: int | None = None,
    *,
    sequence: bool = False,
    experts: ExpertRouting | None = None,
    plan: Mapping[str, object] | None = None,
) -> SplitRecord:
    """Find how a traced step splits, and add it up layer by layer.

    Args:
        step: the step.
        degree: number of members; None: whatever some degree divides.
        sequence: whether values between regions are shared by positions.
        experts: how tokens are routed to experts, of which members have whole ones; None: they
            have a share of each.
        plan: the user's own split: a plan of ``parallelize_module`` for the model; see
            :func:`~planner.tracing.sharding.split.wanted_by`.

    Raises:
        PipeplanError: if the plan cannot be followed, or whole experts cannot be given out.
    """
    wanted = None if plan is None else wanted_by(plan, step.module)
    sequence = sequence or any(isinstance(x, SequenceParallel) for x in (plan or {}).values())
    split = split_step(
        step.exported,
        step.layers,
        degree,
        sequence=sequence,
        experts=experts is not None,
        wanted=wanted,
    )
    if experts is not None:
        experts.require_whole(split.dimensions.classes, step.layers, degree)
    shares = _Shares(step, split, experts or ExpertRouting())
    return SplitRecord(
        degree=degree,
        sequence=sequence,
        regions=tuple(shares.regions()),
        layers=tuple(map(shares.layer(), step.graph.layers)),
        boundaries=tuple(shares.boundaries()),
        summed_parameters=tuple(sorted(split.summed)),
        experts=experts is not None,
        expert_load=() if experts is None else experts.loads,
    )


def with_splits(
    step: TracedStep,
    degrees: Iterable[int],
    *,
    sequence: bool,
    experts: ExpertRouting | None = None,
) -> GraphRecord:
    """Return the layer graph of a step with its splits over groups; see :func:`record_of`."""
    splits = tuple(
        record_of(step, degree, sequence=sequence, experts=experts) for degree in degrees
    )
    return step.graph.model_copy(update={"splits": splits})


class _Shares:
    """What each member has a share of: values and work.

    Rows of experts are not equal shares: the member with the most decides, and has ``most`` times
    the mean. Of a figure w, all t members together have t times its own, ``most`` w, which is
    s + t (w - s) if s = w (t - most) / (t - 1) is shared.
    """

    def __init__(self, step: TracedStep, split: Split, routing: ExpertRouting) -> None:
        self.step, self.split, self.degree = step, split, split.degree or 1
        self.placements = split.placements
        self.found = {**self.placements.positions, **self.placements.shares}
        regions = [region for region in split.regions if region.kind == "experts"]
        self.most = {
            node: routing.most_loaded(place, self.degree)
            for place, region in enumerate(regions)
            for node in region.nodes.union(value for value, _ in region.parts)
            if operator_name(node) != OFFSETS
        }

    def regions(self) -> Iterator[SplitRegion]:
        """Yield the regions with their layers and parameters."""
        names, layer_of = self.step.exported.names, self.step.layers.layer_of
        for region in self.split.regions:
            layers = {layer_of[node] for node in region.nodes}
            held = dict.fromkeys(names.get(str(n.target), "") for n, _ in region.parts)
            places = {n: self.split.parameters[n] for n in held if n in self.split.parameters}
            yield SplitRegion(
                kind=region.kind,
                layers=tuple(name for name in self.step.layers.names if name in layers),
                sizes=region.sizes,
                parameters=tuple(
                    SplitParameter(name=name, dimension=dimension, parts=parts)
                    for name, (dimension, parts) in places.items()
                ),
            )

    def boundaries(self) -> Iterator[BoundarySplit]:
        """Yield the placement of each tensor between layers."""
        for node, _, _ in self.step.layers.crossing_tensors():
            share = self.found.get(node)
            kind: Literal["region", "positions"] = (
                "region" if node in self.placements.shares else "positions"
            )
            if isinstance(node.meta["val"], Tensor):
                yield BoundarySplit(
                    name=node.name,
                    placement=kind if share else "whole",
                    dimension=share.dimension if share else None,
                )

    def layer(self) -> Callable[[Layer], LayerSplit]:
        """Return a function of layers: what members have a share of."""
        measured, split = self.step.measured, self.split
        stash, again = (
            self._held((node, key, bytes_) for key, (node, bytes_) in saved.items())
            for saved in (measured.saved, measured.again)
        )
        late, collectives = self._held(measured.weight_stash), self._collectives()
        rows = self.step.graph.parameters
        sizes, trained = (
            {row.name: row.bytes for row in rows if row.trainable or not only}
            for only in (False, True)
        )

        def split_of(layer: Layer) -> LayerSplit:
            name, layer_of = layer.name, self.step.layers.layer_of
            nodes = [node for node, found in layer_of.items() if found == name]
            held = [parameter for parameter in layer.parameters if parameter in split.parameters]
            of_one, of_all = self._work(nodes)
            of_one.append(gradient_sum(sum(trained.get(parameter, 0) for parameter in held)))
            for parameter in layer.parameters:
                if parameter in trained:
                    copies = 1 if parameter in held else self.degree
                    of_all.append(gradient_sum(copies * trained[parameter]))
            return LayerSplit(
                name=name,
                regions=tuple(
                    index
                    for index, region in enumerate(split.regions)
                    if not region.nodes.isdisjoint(nodes)
                ),
                **{figure: sum(getattr(cost, figure) for cost in of_one) for figure in _WORK},
                stash_bytes=stash[name],
                weight_stash_bytes=late[name],
                work=() if split.degree is None else work_of(of_all),
                parameter_bytes=sum(sizes[parameter] for parameter in held),
                collectives=tuple(collectives[name]),
                products=tuple(self._product(*row) for row in products_of(nodes)),
                unsplit={n: split.unsplit[n] for n in layer.parameters if n in split.unsplit},
                again_bytes=again[name],
            )

        return split_of

    def _of(self, node: fx.Node, figure: int, held: int = 0) -> int:
        """Return how much of a figure is shared, given what of it does not depend on rows."""
        if node not in self.most or self.degree == 1:
            return figure
        held = min(held, figure)
        even = Fraction(self.degree - self.most[node], self.degree - 1)
        return held + int((figure - held) * even)

    def _work(self, nodes: Iterable[fx.Node]) -> tuple[list[OperationCost], list[OperationCost]]:
        """Return the shared work of operations, and the work of all members."""
        of_one, of_all = [], []
        for node in (node for node in nodes if node in self.step.measured.cost):
            cost, count = self.step.measured.cost[node], self.degree
            is_shared = self.placements.is_shared(node)
            # Matrices of experts are moved whatever the rows.
            operands = node.all_input_nodes if operator_name(node) == "grouped_product" else ()
            matrices = sum(bytes_of(n) for n in operands if len(shape_of(n)) > 2)
            whole = {name: getattr(cost, name) for name in _WORK}
            shared: dict[str, Any] = {
                name: is_shared and self._of(node, figure, matrices * name.endswith("bytes"))
                for name, figure in whole.items()
            }
            total = {name: count * whole[name] - (count - 1) * shared[name] for name in _WORK}
            of_one.append(replace(cost, **shared))
            of_all.append(replace(cost, **total))
        return of_one, of_all

    def _product(self, node: fx.Node, product: Product) -> Product:
        """Return a product with what is split of it, and the rows of the most loaded member."""
        rows = round(product.rows * self.most.get(node, 1))
        return product.model_copy(update={"split": self._split_size(node), "rows": rows})

    def _split_size(self, node: fx.Node) -> str | None:
        if node in self.placements.positioned:
            return "rows"
        if node not in self.placements.region_of:
            return None
        if node in self.placements.region_of[node].sums:
            return "inner"
        behind = len(shape_of(node)) - self.placements.shares[node].dimension
        return "columns" if behind == 1 else "batch" if is_batched(node) and behind > 2 else "rows"

    def _held(self, rows: Iterable[tuple[fx.Node, int | None, int]]) -> dict[str, int]:
        """Return what members have a share of among kept bytes, by layer.

        Args:
            rows: operations with the storage that they keep (None: a gradient), and its bytes.
        """
        storage = self.step.measured.storage
        known = set(storage.values())
        shared = {key: node for node, key in storage.items() if node in self.found}
        held: dict[str, int] = defaultdict(int)
        for node, key, bytes_ in rows:
            if key in known:
                owner = shared.get(key)
            else:
                has_share = node in self.found if key is None else self.placements.is_shared(node)
                owner = node if has_share else None
            if owner is not None:
                held[self.step.layers.layer_of[node]] += self._of(owner, bytes_)
        return held

    def _collectives(self) -> dict[str, list[Collective]]:
        """Return the collectives of each layer, as the local graph has them."""
        found: dict[str, list[Collective]] = defaultdict(list)
        for method, value, layer in LocalStep(self.step.exported, self.split).communicated:
            for phase, kind in _KINDS[method]:
                if phase == "forward" or value in self.placements.gradients:
                    bytes_ = self._communicated_bytes(method, value)
                    row = Collective(kind=kind, phase=phase, tensor=value.name, bytes=bytes_)
                    found[layer].append(row)
        return found

    def _communicated_bytes(self, method: str, value: fx.Node) -> int:
        if method in ("send_rows", "return_rows"):  # A member's rows, with those that stay.
            return ceil(bytes_of(value) * self.most[value] / self.degree)
        if method == "expert_counts":
            counts = [user for user in value.users if operator_name(user) == OFFSETS]
            return self.degree * sum(map(bytes_of, counts))
        return bytes_of(value) // (shape_of(value)[1] if method == "cross_entropy_loss" else 1)
