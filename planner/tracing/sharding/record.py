"""The record of a step's split: what is shared and what is communicated, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import ceil

from torch import Tensor, fx

from planner.errors import PipeplanError
from planner.job import Job
from planner.model.figures import PHASES, Collective, CollectiveKind, Product, Work
from planner.model.graph_record import GraphRecord
from planner.model.split_record import (
    BoundarySplit,
    LayerSplit,
    SplitRecord,
    SplitRegion,
    most_loaded,
)
from planner.tracing.export import ExportedStep
from planner.tracing.measure import Held, is_batched, products_of
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions
from planner.tracing.sharding.local import LocalStep
from planner.tracing.sharding.rules import OFFSETS
from planner.tracing.sharding.split import Split, split_step, unsplit_parameters
from planner.tracing.sharing import bytes_of, operator_name, shape_of
from planner.tracing.trace import TracedStep, figures_of, held_by, work_of, work_rows

Loads = tuple[tuple[float, ...], ...]
"""Relative numbers of tokens of a layer's experts: of all layers with experts, or of each in turn;
empty: equally many."""
_INSTEAD = "leave expert_parallel out"
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


def routing_of(job: Job) -> Loads | None:
    """Return the loads for which a job divides experts; None if it gives out no whole ones."""
    return job.expert_loads if job.expert_parallel else None


def degrees_with_experts(exported: ExportedStep, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the degrees that divide the experts of every layer.

    Raises:
        PipeplanError: if there are none.
    """
    counts = sorted({row.experts for row in Dimensions(exported).classes} - {0})
    found = tuple(degree for degree in degrees if all(count % degree == 0 for count in counts))
    if degrees and not found:
        raise PipeplanError(
            f'tensor_parallel = "any": none of {", ".join(map(str, degrees))} divides the '
            f"{' and '.join(map(str, counts))} experts of a layer; choose another number of "
            f"experts, or {_INSTEAD}"
        )
    return found


def with_splits(
    step: TracedStep, degrees: Iterable[int], *, sequence: bool, experts: Loads | None = None
) -> GraphRecord:
    """Return the layer graph of a step with its splits over groups; see :func:`record_of`."""
    found = (record_of(step, degree, sequence=sequence, experts=experts) for degree in degrees)
    return step.graph.model_copy(update={"splits": tuple(found)})


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
        _require_whole_experts(split, experts)
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


def _load_of(loads: Loads, place: int) -> tuple[float, ...]:
    """Return the load of a layer by its place among those with experts."""
    return loads[place if len(loads) > 1 else 0] if loads else ()


def _require_whole_experts(split: Split, loads: Loads) -> None:
    """Refuse to give out experts that are not there, or not over so many members.

    Raises:
        PipeplanError: naming the layers.
    """
    experts = [row for row in split.dimensions.classes if row.experts]
    if not experts:
        raise PipeplanError(
            "expert_parallel = true: the model sends no tokens to experts by the operations of "
            "planner.tracing.expert_operations (docs/experts.md), so that there are no whole "
            f"experts to give out; use these operations, or {_INSTEAD}"
        )
    if len(loads) not in (0, 1, len(experts)):
        raise PipeplanError(
            f"expert_load: has lists for {len(loads)} layers, but {len(experts)} have experts; "
            "give a list for each, or one for all"
        )
    problems = []
    for place, row in enumerate(experts):
        layer = next(split.layer_of[n] for n, _ in row.parts if n in split.layer_of)
        if (given := len(_load_of(loads, place)) or row.experts) != row.experts:
            problems.append(
                f"expert_load: has {given} numbers, but layer {layer!r} has {row.experts} experts; "
                "give one for each"
            )
        if row.obstacles:
            problems.append(
                f"expert_parallel = true: the experts of layer {layer!r} cannot be given out "
                f"whole: {row.obstacles[0]}; {_INSTEAD}"
            )
        if row.experts % split.degree:
            problems.append(
                f"tensor_parallel = {split.degree}: does not divide the {row.experts} experts of "
                f"layer {layer!r}; choose a divisor of them, or {_INSTEAD}"
            )
    if problems:
        raise PipeplanError(dict.fromkeys(problems))


class _Shares:
    """What each member has a share of: values and work.

    Rows of experts are not equal shares: the member with the most decides, and has ``most`` times
    the mean. Of a figure w, all t members together have t times its own, ``most`` w, which is
    s + t (w - s) if s = w (t - most) / (t - 1) is shared.
    """

    def __init__(self, step: TracedStep, split: Split, loads: Loads) -> None:
        self.step, self.split, self.degree = step, split, split.degree
        self.shared = {**split.positions, **split.shares}
        regions = [region for region in split.regions if region.kind == "experts"]
        self.most = {
            node: most_loaded(_load_of(loads, place), self.degree) if loads else Fraction(1)
            for place, region in enumerate(regions)
            for node in region.nodes.union(value for value, _ in region.parts)
            if operator_name(node) != OFFSETS
        }
        storage = step.measured.storage
        self.stored = {*storage.values()}
        self.owner = {key: node for node, key in storage.items() if node in self.shared}

    def region(self, region: DimensionClass) -> SplitRegion:
        """Return a region with its layers and parameters."""
        layers = {self.split.layer_of[node] for node in region.nodes}
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
            if isinstance(node.meta["val"], Tensor):
                share, is_inside = self.shared.get(node), node in self.split.shares
                yield BoundarySplit(
                    name=node.name,
                    placement="region" if is_inside else "positions" if share else "whole",
                    dimension=share.dimension if share else None,
                )

    def layers(self) -> Iterator[LayerSplit]:
        """Yield what members have a share of, layer by layer."""
        held = held_by(self.step.layers, self.step.measured, self._held)
        collectives, unsplit = self._collectives(), unsplit_parameters(self.split)
        sizes = {row.name: row.bytes for row in self.step.graph.parameters}
        nodes_of, others = self.step.layers.nodes_of, self.degree - 1
        for layer in self.step.graph.layers:
            nodes, own = nodes_of[layer.name], layer.parameters
            of_one, of_all = list[Work](), list[Work]()
            rows = work_rows(nodes, {*own}, self.step.measured, self.step.graph.parameters)
            for by, row in rows:
                flops, bytes_ = self._shared_work(by, row)
                of_one.append(row.model_copy(update={"flops": flops, "traffic_bytes": bytes_}))
                flops = self.degree * row.flops - others * flops
                bytes_ = self.degree * row.traffic_bytes - others * bytes_
                of_all.append(row.model_copy(update={"flops": flops, "traffic_bytes": bytes_}))
            yield LayerSplit(
                name=layer.name,
                regions=tuple(
                    place
                    for place, region in enumerate(self.split.regions)
                    if not region.nodes.isdisjoint(nodes)
                ),
                **figures_of(of_one),
                **held[layer.name],
                work=work_of(of_all),
                parameter_bytes=sum(sizes[name] for name in own if name in self.split.parameters),
                collectives=tuple(collectives[layer.name]),
                products=tuple(self._product(*row) for row in products_of(nodes)),
                unsplit={name: unsplit[name] for name in own if name in unsplit},
            )

    def _of(self, node: fx.Node, figure: int, held: int = 0) -> int:
        """Return how much of a figure is shared, given what of it does not depend on rows."""
        if node not in self.most:
            return figure
        held = min(held, figure)
        even = Fraction(self.degree - self.most[node], self.degree - 1)
        return held + int((figure - held) * even)

    def _shared_work(self, by: fx.Node | str, row: Work) -> tuple[int, int]:
        """Return the FLOPs and the traffic that are shared of the work by an operation."""
        if isinstance(by, str):  # Of a parameter, whose gradient is added up.
            return 0, row.traffic_bytes * (by in self.split.parameters)
        if not self.split.is_shared(by):
            return 0, 0
        # Matrices of experts are moved whatever the rows.
        operands = by.all_input_nodes if operator_name(by) == "grouped_product" else ()
        matrices = sum(bytes_of(n) for n in operands if len(shape_of(n)) > 2)
        return self._of(by, row.flops), self._of(by, row.traffic_bytes, matrices)

    def _held(self, row: Held) -> int:
        """Return the bytes that members have a share of among what an operation keeps."""
        node, key, bytes_ = row
        if key in self.stored:
            owner = self.owner.get(key)
        else:
            has_share = node in self.shared if key is None else self.split.is_shared(node)
            owner = node if has_share else None
        return 0 if owner is None else self._of(owner, bytes_)

    def _product(self, node: fx.Node, product: Product) -> Product:
        """Return a product with what is split of it, and the rows of the most loaded member."""
        split = None
        if node in self.split.positioned:
            split = "rows"
        elif node in self.split.region_of and node in self.split.sums:
            split = "inner"
        elif node in self.split.region_of:
            behind = len(shape_of(node)) - self.split.shares[node].dimension
            is_of_batch = is_batched(node) and behind > 2
            split = "columns" if behind == 1 else "batch" if is_of_batch else "rows"
        rows = round(product.rows * self.most.get(node, 1))
        return product.model_copy(update={"split": split, "rows": rows})

    def _collectives(self) -> dict[str, list[Collective]]:
        """Return the collectives of each layer, as the local graph has them."""
        found: dict[str, list[Collective]] = defaultdict(list)
        for method, value, layer in LocalStep(self.step.exported, self.split).communicated:
            size, count = bytes_of(value), 1
            if method == "cross_entropy_loss":
                # The highest logits, their sums, and the logits of the targets.
                size, count = size // shape_of(value)[1], 3
            elif method in ("send_rows", "return_rows"):  # A member's, with those that stay.
                size = ceil(size * self.most[value] / self.degree)
            elif method == "expert_counts":
                counts = [user for user in value.users if operator_name(user) == OFFSETS]
                size = self.degree * sum(map(bytes_of, counts))
            for phase, kind in zip(PHASES, _KINDS[method], strict=False):
                if kind and (phase == "forward" or value in self.split.gradients):
                    row = Collective(kind=kind, phase=phase, tensor=value.name, bytes=size)
                    found[layer] += [row] * count
        return found
