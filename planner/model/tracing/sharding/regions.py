"""Choice of what is split: regions, each a class of dimensions that no operation needs whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE, RegionKind
from planner.model.tracing.sharding.axes import (
    COMBINE,
    DISPATCH,
    OFFSETS,
    Axis,
    Dimension,
    operator_name,
    shape_of,
)
from planner.model.tracing.sharding.dimensions import DimensionClass, Dimensions, Parts
from planner.model.tracing.sharding.user_plan import Wanted
from planner.tracing.export import ExportedStep
from planner.tracing.operators import MATRIX_PRODUCTS


@dataclass(frozen=True)
class Region:
    """Operations that are split together, between values that every rank has whole.

    Attributes:
        kind: ``heads``, ``vocabulary``, ``columns``: columns of a product and rows of the next; or
            ``experts``: whole ones, with the rows of the tokens that chose them.
        parts: what is split: dimensions of values and parameters, with the parts of each.
        nodes: operations that each do a share of the work.
        sums: those among them whose result is a partial sum.
        sizes: what a degree has to divide.
    """

    kind: RegionKind
    parts: Mapping[Dimension, Parts]
    nodes: frozenset[fx.Node]
    sums: frozenset[fx.Node]
    sizes: tuple[int, ...]

    def split_dimension(self, node: fx.Node) -> tuple[int, Parts] | None:
        """Return the dimension of a value that is split, with its parts; None if none is."""
        for own in range(len(shape_of(node))):
            if (node, own) in self.parts:
                return own, self.parts[node, own]
        return None


@dataclass(frozen=True)
class Choice:
    """What is split and what is not.

    Attributes:
        regions: without common operations, in executable order.
        unsplit: reasons by parameter of a matrix product or table that no region splits.
    """

    regions: tuple[Region, ...]
    unsplit: Mapping[str, str]


def choose(
    exported: ExportedStep,
    dimensions: Dimensions,
    order: Mapping[fx.Node, int],
    degree: int | None = None,
    wanted: Wanted | None = None,
    *,
    experts: bool = False,
) -> Choice:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up.

    Args:
        exported: the step.
        dimensions: its classes.
        order: position of each operation.
        degree: number of devices; None: whatever some degree divides.
        wanted: what is split instead.
        experts: whether whole experts are given out, before anything else; otherwise never.

    Raises:
        PipeplanError: if something wanted cannot be split, or not without something else.
    """
    axes_by_class: dict[int, list[tuple[fx.Node, Axis]]] = {}
    for node, axes in dimensions.axes.items():
        for axis in axes:
            for member in (*axis.inputs, *axis.outputs)[:1]:
                axes_by_class.setdefault(dimensions.class_of[member], []).append((node, axis))
    gain = {
        index: sum(_work(node, axis) for node, axis in rows)
        for index, rows in axes_by_class.items()
        if _is_splittable(dimensions.classes[index], degree)
        and (experts or not dimensions.classes[index].experts)
    }
    if wanted is not None:
        gain = {
            i: gain.get(i, 0) or 1
            for i in _wanted_classes(exported, dimensions, wanted, gain, degree)
        }
    taken: set[fx.Node] = set()
    regions: list[Region] = []

    def rank(index: int) -> tuple[bool, int, int]:
        is_other = not dimensions.classes[index].experts
        return is_other, -gain[index], _first(axes_by_class[index], order)

    for index in sorted(gain, key=rank):
        region = _region(dimensions.classes[index], axes_by_class[index])
        if gain[index] and taken.isdisjoint(region.nodes):
            taken |= region.nodes
            regions.append(region)
    regions.sort(key=lambda region: min(order[node] for node in region.nodes))
    return Choice(tuple(regions), _unsplit(exported, dimensions, regions, degree))


def _wanted_classes(
    exported: ExportedStep,
    dimensions: Dimensions,
    wanted: Wanted,
    splittable: Collection[int],
    degree: int | None,
) -> list[int]:
    """Return the classes that hold what is wanted, and no other weight."""
    name_of = {
        node: exported.names.get(str(node.target))
        for node in exported.graph.find_nodes(op="get_attr")
    }
    found: dict[int, None] = {}
    problems = []
    for node, name in name_of.items():
        if name is None or name not in wanted.dimensions:
            continue
        index = dimensions.class_of[node, wanted.dimensions[name]]
        found[index] = None
        if index not in splittable:
            reason = _reason(dimensions.classes[index], degree)
            problems.append(
                f"plan: dimension {wanted.dimensions[name]} of {name!r} cannot be split: {reason}; "
                "leave its module out"
            )
    for index in found:
        for node, own in dimensions.classes[index].parts:
            name = name_of.get(node)
            is_weight = name is not None and len(shape_of(node)) > 1
            if is_weight and wanted.dimensions.get(str(name)) != own:
                problems.append(
                    f"plan: dimension {own} of {name!r} is split together with what the plan "
                    "splits; name its module too, with the style for that"
                )
    if problems:
        raise PipeplanError(dict.fromkeys(problems))
    return list(found)


def _is_splittable(found: DimensionClass, degree: int | None) -> bool:
    has_parameter = any(node.op == "get_attr" for node, _ in found.parts)
    divides = found.divisor > 1 if degree is None else found.divisor % degree == 0
    return has_parameter and not found.obstacles and divides


def _first(rows: Sequence[tuple[fx.Node, Axis]], order: Mapping[fx.Node, int]) -> int:
    return min(order[node] for node, _ in rows)


def _work(node: fx.Node, axis: Axis) -> int:
    """Return multiplications of a product along an axis, and a table's elements."""
    name = operator_name(node)
    if name in MATRIX_PRODUCTS:
        weight = [n for n in node.all_input_nodes if len(shape_of(n)) > 1]
        return prod(shape_of(node)) * max(shape_of(n)[-1] for n in weight[:1])
    if name == "embedding" and not axis.outputs:
        rows, width = shape_of(axis.inputs[0][0])
        return rows * width if rows > _looked_up(node) else 0
    return 0


def _looked_up(node: fx.Node) -> int:
    """Return how many rows of a table a sample looks up; by a constant index, it may be all."""
    index = node.args[1]
    assert isinstance(index, fx.Node)
    ahead, seen = [index], {index}
    while ahead:
        ahead += (new := set(ahead.pop().all_input_nodes) - seen)
        seen |= new
    is_constant = all(value.op != "placeholder" for value in seen)
    return shape_of(node.args[0])[0] if is_constant else prod(shape_of(index)[1:])  # type: ignore[arg-type]


def _region(found: DimensionClass, rows: Iterable[tuple[fx.Node, Axis]]) -> Region:
    rows = list(rows)
    nodes = frozenset(node for node, _ in rows)
    sums = frozenset(
        node
        for node, axis in rows
        if not axis.outputs and operator_name(node) != "cross_entropy_loss"
    )
    return Region(_kind(nodes, sums), found.parts, nodes, sums, found.sizes)


def is_routing(node: fx.Node) -> bool:
    """Return whether an operation sends tokens to experts, or brings their rows back."""
    return operator_name(node) in (DISPATCH, OFFSETS, COMBINE)


def _kind(nodes: frozenset[fx.Node], sums: frozenset[fx.Node]) -> RegionKind:
    names = set(map(operator_name, nodes))
    if any(map(is_routing, nodes)):
        return "experts"
    if names & {"scaled_dot_product_attention", "softmax", "_softmax"}:
        return "heads"
    if "cross_entropy_loss" in names or "embedding" in map(operator_name, sums):
        return "vocabulary"
    return "columns"


def _unsplit(
    exported: ExportedStep,
    dimensions: Dimensions,
    regions: Sequence[Region],
    degree: int | None,
) -> dict[str, str]:
    """Return why each parameter with two dimensions or more is not split."""
    split = {
        exported.names.get(str(node.target))
        for region in regions
        for node, _ in region.parts
        if node.op == "get_attr"
    }
    reasons: dict[str, str] = {}
    for node in exported.graph.find_nodes(op="get_attr"):
        name = exported.names.get(str(node.target))
        if node not in dimensions.data or name is None or name in split:
            continue
        classes = {
            own: dimensions.classes[dimensions.class_of[node, own]]
            for own in range(len(shape_of(node)))
            if (node, own) in dimensions.class_of
        }
        if len(shape_of(node)) > 1 and classes:
            reasons[name] = "; ".join(
                f"dimension {own}: {_reason(found, degree)}" for own, found in classes.items()
            )
    return reasons


def _reason(found: DimensionClass, degree: int | None) -> str:
    if found.obstacles:
        return found.obstacles[0]
    if found.divisor == 1 or found.divisor % (degree or 1):
        sizes = [str(size) for size in found.sizes if size % (degree or 2)]
        return f"size {', '.join(sizes)} {INDIVISIBLE} {degree or 2}"
    return "no matrix product would be split, or those that would are split better"
