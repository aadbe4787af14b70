"""The record of a step's split: what is shared and what is communicated, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from torch import Tensor, fx

from planner.model.figures import PHASES, Collective, CollectiveKind, Phase, Product, Work
from planner.model.graph_record import GraphRecord, Layer
from planner.model.split_record import (
    BoundarySplit,
    LayerSplit,
    SplitParameter,
    SplitRecord,
    SplitRegion,
)
from planner.model.tracing.sharding.axes import OFFSETS, operator_name, shape_of
from planner.model.tracing.sharding.localise import Localiser, part_sizes
from planner.model.tracing.sharding.placements import bytes_of
from planner.model.tracing.sharding.regions import Region
from planner.model.tracing.sharding.routing import ExpertRouting, require_whole_experts
from planner.model.tracing.sharding.split import Split, split_step
from planner.model.tracing.sharding.user_plan import wanted_by
from planner.tracing.measure import OperationCost
from planner.tracing.products import is_batched, products_of
from planner.tracing.trace import TracedStep, gradient_sum, work_of

_OF_ROWS = ("send_rows", "return_rows")
_KINDS: Mapping[tuple[str, Phase], CollectiveKind] = {
    ("all_reduce", "forward"): "all_reduce",
    ("copy", "input_gradient"): "all_reduce",
    ("reduce_scatter", "forward"): "reduce_scatter",
    ("reduce_scatter", "input_gradient"): "all_gather",
    ("gather", "forward"): "all_gather",
    ("gather_partial", "forward"): "all_gather",
    ("gather_partial", "input_gradient"): "reduce_scatter",
    # Each member keeps its share for the backward.
    ("gather_partial", "weight_gradient"): "all_gather",
    ("scatter", "input_gradient"): "all_gather",
    ("expert_counts", "forward"): "all_gather",
    **{(name, phase): "all_to_all" for name in _OF_ROWS for phase in PHASES[:2]},
}


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
            :func:`~planner.model.tracing.sharding.user_plan.wanted_by`.

    Raises:
        PipeplanError: if the plan cannot be followed, or whole experts cannot be given out.
    """
    wanted = None if plan is None else wanted_by(plan, step.module)
    sequence = sequence or (wanted is not None and wanted.sequence)
    split = split_step(
        step.exported,
        step.layers,
        degree,
        sequence=sequence,
        experts=experts is not None,
        wanted=wanted,
    )
    if experts is not None:
        require_whole_experts(split.dimensions.classes, step.layers, degree, experts)
    shares = _Shares(split, degree, experts or ExpertRouting())
    return SplitRecord(
        degree=degree,
        sequence=sequence,
        regions=tuple(_region(step, region) for region in split.regions),
        layers=tuple(_layers(step, split, shares, degree)),
        boundaries=tuple(shares.boundaries(step)),
        summed_parameters=tuple(
            sorted({step.exported.names[str(node.target)] for node in split.placements.summed})
        ),
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
    """Return the layer graph of a step with its splits over groups.

    Args:
        step: the step.
        degrees: numbers of members.
        sequence: whether values between regions are shared by positions.
        experts: as of :func:`record_of`.
    """
    splits = tuple(
        record_of(step, degree, sequence=sequence, experts=experts) for degree in degrees
    )
    return step.graph.model_copy(update={"splits": splits})


class _Shares:
    """What each member has a share of: values, with how and by which dimension, and work.

    Rows of experts are not equal shares: the member with the most decides, and has ``most`` times
    the mean. Of a figure w, all t members together have t times its own, ``most`` w, which is
    s + t (w - s) if s = w (t - most) / (t - 1) is shared.
    """

    def __init__(self, split: Split, degree: int | None, routing: ExpertRouting) -> None:
        self.split, self.degree = split, degree or 1
        regions = [region for region in split.regions if region.kind == "experts"]
        self._most = {
            node: routing.most_loaded(place, self.degree)
            for place, region in enumerate(regions)
            for node in region.nodes.union(value for value, _ in region.parts)
            if operator_name(node) != OFFSETS
        }
        self.found: dict[fx.Node, tuple[Literal["region", "positions"], int]] = {
            node: ("positions", own) for node, (own, _) in split.placements.sequence.items()
        }
        for region in split.regions:
            self.found.update((node, ("region", own)) for node, own in region.parts)

    def boundaries(self, step: TracedStep) -> Iterator[BoundarySplit]:
        """Yield the placement of each tensor between layers."""
        for node, _, _ in step.layers.crossing_tensors():
            if isinstance(node.meta["val"], Tensor):
                found = self.found.get(node)
                yield BoundarySplit(
                    name=node.name,
                    placement=found[0] if found else "whole",
                    dimension=found[1] if found else None,
                )

    def _of(self, node: fx.Node, figure: int, held: int = 0) -> int:
        """Return how much of a figure is shared, given what of it does not depend on rows."""
        if node not in self._most or self.degree == 1:
            return figure
        held = min(held, figure)
        even = Fraction(self.degree - self._most[node], self.degree - 1)
        return held + int((figure - held) * even)

    def work(self, node: fx.Node, cost: OperationCost) -> OperationCost:
        """Return the shared work of an operation; its matrices are moved whatever the rows."""
        shared: dict[str, Any] = dict.fromkeys(_WORK, 0)
        if _is_shared(node, self.split):
            operands = node.all_input_nodes if operator_name(node) == "grouped_product" else ()
            held = sum(bytes_of(n) for n in operands if len(shape_of(n)) > 2)
            for name in _WORK:
                figure = getattr(cost, name)
                shared[name] = self._of(node, figure, held if name.endswith("bytes") else 0)
        return replace(cost, **shared)

    def of_all(self, node: fx.Node, cost: OperationCost) -> OperationCost:
        """Return the work of all members: what is not shared as often as there are members."""
        shared, count = self.work(node, cost), self.degree
        total: dict[str, Any] = {
            name: getattr(cost, name) * count - getattr(shared, name) * (count - 1)
            for name in _WORK
        }
        return replace(cost, **total)

    def rows_sent(self, value: fx.Node) -> int:
        """Return the bytes of rows that a member sends and keeps in an all-to-all."""
        return ceil(bytes_of(value) * self._most[value] / self.degree)

    def product(self, node: fx.Node, product: Product) -> Product:
        """Return a product with what is split of it, and the rows of the most loaded member."""
        found = {"split": _split_size(node, self.split, is_batched(node))}
        rows = round(product.rows * self._most.get(node, 1))
        return product.model_copy(update={**found, "rows": rows})

    def stash(self, step: TracedStep) -> dict[str, int]:
        """Return the bytes of each layer's stash of which each member keeps a share."""
        return self._held(step, _storages(step.measured.saved))

    def again(self, step: TracedStep) -> dict[str, int]:
        """Return the same of what backwards make again."""
        return self._held(step, _storages(step.measured.again))

    def weight_stash(self, step: TracedStep) -> dict[str, int]:
        """Return the same of what weight gradients of split backwards need."""
        return self._held(step, step.measured.weight_stash)

    def _held(
        self, step: TracedStep, rows: Iterable[tuple[fx.Node, int | None, int]]
    ) -> dict[str, int]:
        known = set(step.measured.storage.values())
        shared = {key: n for n, key in step.measured.storage.items() if n in self.found}
        held: dict[str, int] = dict.fromkeys(step.layers.names, 0)
        for node, key, bytes_ in rows:
            if key is None:
                owner = node if node in self.found else None
            elif key in known:
                owner = shared.get(key)
            else:
                owner = node if _is_shared(node, self.split) else None
            if owner is not None:
                held[step.layers.layer_of[node]] += self._of(owner, bytes_)
        return held


_WORK = tuple(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes"))


def _storages(
    saved: Mapping[int, tuple[fx.Node, int]],
) -> Iterator[tuple[fx.Node, int | None, int]]:
    return ((node, key, bytes_) for key, (node, bytes_) in saved.items())


def _region(step: TracedStep, region: Region) -> SplitRegion:
    names = step.exported.names
    layers = {step.layers.layer_of[node] for node in region.nodes}
    split = {
        names[str(node.target)]: (own, part_sizes(shape_of(node)[own], parts))
        for (node, own), parts in region.parts.items()
        if node.op == "get_attr" and str(node.target) in names
    }
    return SplitRegion(
        kind=region.kind,
        layers=tuple(name for name in step.layers.names if name in layers),
        sizes=region.sizes,
        parameters=tuple(
            SplitParameter(name=name, dimension=own, parts=parts)
            for name, (own, parts) in split.items()
        ),
    )


def _layers(
    step: TracedStep, split: Split, shares: _Shares, degree: int | None
) -> Iterator[LayerSplit]:
    stash, late = shares.stash(step), shares.weight_stash(step)
    again = shares.again(step)
    collectives = _collectives(step, split, shares)
    parameters = {row.name: row for row in step.graph.parameters}
    for layer in step.graph.layers:
        nodes = [node for node, name in step.layers.layer_of.items() if name == layer.name]
        cost_of = step.measured.cost
        costs = [shares.work(n, cost_of[n]) for n in nodes if n in cost_of]
        work = {name: sum(getattr(cost, name) for cost in costs) for name in _WORK}
        held = [name for name in layer.parameters if name in split.parameters]
        gradient = 3 * sum(parameters[name].bytes for name in held if parameters[name].trainable)
        work["weight_gradient_traffic_bytes"] += gradient
        yield LayerSplit(
            name=layer.name,
            regions=tuple(
                index
                for index, region in enumerate(split.regions)
                if not region.nodes.isdisjoint(nodes)
            ),
            **work,
            stash_bytes=stash[layer.name],
            weight_stash_bytes=late[layer.name],
            work=() if degree is None else tuple(_group_work(step, shares, layer, nodes)),
            parameter_bytes=sum(parameters[name].bytes for name in held),
            collectives=tuple(collectives.get(layer.name, ())),
            products=tuple(shares.product(*row) for row in products_of(nodes)),
            unsplit={n: split.unsplit[n] for n in layer.parameters if n in split.unsplit},
            again_bytes=again[layer.name],
        )


def _group_work(
    step: TracedStep, shares: _Shares, layer: Layer, nodes: Sequence[fx.Node]
) -> Iterator[Work]:
    """Yield the work of all members: of each operation that is not shared as often as they are."""
    measured = step.measured.cost
    costs = [shares.of_all(node, measured[node]) for node in nodes if node in measured]
    sizes = {row.name: row.bytes for row in step.graph.parameters if row.trainable}
    for name in layer.parameters:
        if name in sizes:
            copies = 1 if name in shares.split.parameters else shares.degree
            costs.append(gradient_sum(copies * sizes[name]))
    yield from work_of(costs)


def _is_shared(node: fx.Node, split: Split) -> bool:
    return node in split.placements.region_of or node in split.placements.shared


def _collectives(step: TracedStep, split: Split, shares: _Shares) -> dict[str, list[Collective]]:
    """Return the collectives of each layer, as the local graph has them."""
    found: dict[str, list[Collective]] = {}
    localiser = Localiser(step.exported, split, 1)
    localiser.run()
    for method, value, layer in localiser.communicated:
        rows = found.setdefault(layer, [])
        for phase in PHASES:
            kind = _KINDS.get((method, phase))
            if kind is not None and (phase == "forward" or value in split.gradients):
                size = shares.rows_sent(value) if method in _OF_ROWS else bytes_of(value)
                if method == "expert_counts":
                    size = shares.degree * _counts_bytes(value)
                rows.append(Collective(kind=kind, phase=phase, tensor=value.name, bytes=size))
        if method == "cross_entropy_loss":
            rows += _loss(value)
    return found


def _loss(logits: fx.Node) -> list[Collective]:
    """Return the three reductions of a loss: highest logits, sums, and logits of the targets."""
    bytes_ = bytes_of(logits) // shape_of(logits)[1]
    row = Collective(kind="all_reduce", phase="forward", tensor=logits.name, bytes=bytes_)
    return [row] * 3


def _counts_bytes(chosen: fx.Node) -> int:
    """Return the bytes of the number of tokens that chose each expert."""
    return sum(bytes_of(user) for user in chosen.users if operator_name(user) == OFFSETS)


def _split_size(
    node: fx.Node, split: Split, batched: bool
) -> Literal["batch", "rows", "inner", "columns"] | None:
    if node in split.placements.shared:
        return "rows"
    region = split.placements.region_of.get(node)
    if region is None:
        return None
    if node in region.sums:
        return "inner"
    found = region.split_dimension(node)
    assert found is not None
    own, rank = found[0], len(shape_of(node))
    return "columns" if own == rank - 1 else "batch" if batched and own < rank - 2 else "rows"
