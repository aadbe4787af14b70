"""The record of a step's split: what is shared and what is communicated, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

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
from planner.model.tracing.measure import OperationCost
from planner.model.tracing.products import is_batched, products_of
from planner.model.tracing.sharding.axes import shape_of
from planner.model.tracing.sharding.localise import Localiser, part_sizes
from planner.model.tracing.sharding.placements import bytes_of
from planner.model.tracing.sharding.regions import Region
from planner.model.tracing.sharding.split import Split, split_step
from planner.model.tracing.sharding.user_plan import wanted_by
from planner.model.tracing.trace import TracedStep, gradient_sum, work_of

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
}


def record_of(
    step: TracedStep,
    degree: int | None = None,
    *,
    sequence: bool = False,
    plan: Mapping[str, object] | None = None,
) -> SplitRecord:
    """Find how a traced step splits, and add it up layer by layer.

    Args:
        step: the step.
        degree: number of members; None: whatever some degree divides.
        sequence: whether values between regions are shared by positions.
        plan: the user's own split: a plan of ``parallelize_module`` for the model; see
            :func:`~planner.model.tracing.sharding.user_plan.wanted_by`.

    Raises:
        PipeplanError: if the plan cannot be followed.
    """
    wanted = None if plan is None else wanted_by(plan, step.module)
    sequence = sequence or (wanted is not None and wanted.sequence)
    split = split_step(step.exported, step.layers, degree, sequence=sequence, wanted=wanted)
    shares = _Shares(split)
    return SplitRecord(
        degree=degree,
        sequence=sequence,
        regions=tuple(_region(step, region) for region in split.regions),
        layers=tuple(_layers(step, split, shares, degree)),
        boundaries=tuple(shares.boundaries(step)),
        summed_parameters=tuple(
            sorted({step.exported.names[str(node.target)] for node in split.placements.summed})
        ),
    )


def with_splits(step: TracedStep, degrees: Iterable[int], *, sequence: bool) -> GraphRecord:
    """Return the layer graph of a step with its splits over groups.

    Args:
        step: the step.
        degrees: numbers of members.
        sequence: whether values between regions are shared by positions.
    """
    splits = tuple(record_of(step, degree, sequence=sequence) for degree in degrees)
    return step.graph.model_copy(update={"splits": splits})


class _Shares:
    """Values of which each member has a share, with how and by which dimension."""

    def __init__(self, split: Split) -> None:
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

    def stash(self, step: TracedStep, split: Split) -> dict[str, int]:
        """Return the bytes of each layer's stash of which each member keeps a share."""
        return self._held(step, split, _storages(step.measured.saved))

    def again(self, step: TracedStep, split: Split) -> dict[str, int]:
        """Return the same of what backwards make again."""
        return self._held(step, split, _storages(step.measured.again))

    def weight_stash(self, step: TracedStep, split: Split) -> dict[str, int]:
        """Return the same of what weight gradients of split backwards need."""
        return self._held(step, split, step.measured.weight_stash)

    def _held(
        self, step: TracedStep, split: Split, rows: Iterable[tuple[fx.Node, int | None, int]]
    ) -> dict[str, int]:
        storage = step.measured.storage
        shared = {key for node, key in storage.items() if node in self.found}
        known = set(storage.values())
        held: dict[str, int] = dict.fromkeys(step.layers.names, 0)
        for node, key, bytes_ in rows:
            if key is None:
                is_shared = node in self.found
            else:
                is_shared = key in shared or (key not in known and _is_shared(node, split))
            if is_shared:
                held[step.layers.layer_of[node]] += bytes_
        return held


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
    stash, late = shares.stash(step, split), shares.weight_stash(step, split)
    again = shares.again(step, split)
    collectives = _collectives(step, split)
    parameters = {row.name: row for row in step.graph.parameters}
    for layer in step.graph.layers:
        nodes = [node for node, name in step.layers.layer_of.items() if name == layer.name]
        cost_of = step.measured.cost
        costs = [cost_of[n] for n in nodes if n in cost_of and _is_shared(n, split)]
        work = {
            f"{phase}_{what}": sum(getattr(cost, f"{phase}_{what}") for cost in costs)
            for phase in PHASES
            for what in ("flops", "traffic_bytes")
        }
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
            work=() if degree is None else tuple(_group_work(step, split, layer, nodes, degree)),
            parameter_bytes=sum(parameters[name].bytes for name in held),
            collectives=tuple(collectives.get(layer.name, ())),
            products=tuple(_products(nodes, split)),
            unsplit={n: split.unsplit[n] for n in layer.parameters if n in split.unsplit},
            again_bytes=again[layer.name],
        )


def _group_work(
    step: TracedStep, split: Split, layer: Layer, nodes: Sequence[fx.Node], degree: int
) -> Iterator[Work]:
    """Yield the work of all members: of each operation that is not shared as often as they are."""
    copies = [(node, 1 if _is_shared(node, split) else degree) for node in nodes]
    costs = [_copies(step.measured.cost[n], k) for n, k in copies if n in step.measured.cost]
    sizes = {row.name: row.bytes for row in step.graph.parameters if row.trainable}
    for name in layer.parameters:
        if name in sizes:
            costs.append(gradient_sum(sizes[name] * (1 if name in split.parameters else degree)))
    yield from work_of(costs)


def _copies(cost: OperationCost, count: int) -> OperationCost:
    names = (f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes"))
    return replace(cost, **{name: count * getattr(cost, name) for name in names})


def _is_shared(node: fx.Node, split: Split) -> bool:
    return node in split.placements.region_of or node in split.placements.shared


def _collectives(step: TracedStep, split: Split) -> dict[str, list[Collective]]:
    """Return the collectives of each layer, as the local graph has them."""
    found: dict[str, list[Collective]] = {}
    localiser = Localiser(step.exported, split, 1)
    localiser.run()
    for method, value, layer in localiser.communicated:
        rows = found.setdefault(layer, [])
        for phase in PHASES:
            kind = _KINDS.get((method, phase))
            if kind is not None and (phase == "forward" or value in split.gradients):
                rows.append(
                    Collective(kind=kind, phase=phase, tensor=value.name, bytes=bytes_of(value))
                )
        if method == "cross_entropy_loss":
            rows += _loss(value)
    return found


def _loss(logits: fx.Node) -> list[Collective]:
    """Return the three reductions of a loss: highest logits, sums, and logits of the targets."""
    bytes_ = bytes_of(logits) // shape_of(logits)[1]
    row = Collective(kind="all_reduce", phase="forward", tensor=logits.name, bytes=bytes_)
    return [row] * 3


def _products(nodes: list[fx.Node], split: Split) -> Iterator[Product]:
    for node, product in products_of(nodes):
        found = _split_size(node, split, is_batched(node))
        yield product.model_copy(update={"split": found})


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
