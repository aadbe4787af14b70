"""Choice of what is split: regions, each a class of dimensions that no operation needs whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE, RegionKind
from planner.tracing.export import ExportedStep
from planner.tracing.operators import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, Parts, tied_nodes
from planner.tracing.sharding.notation import COMBINE, DISPATCH, OFFSETS, Axis, Dimension
from planner.tracing.sharing import operator_name, shape_of


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


def choose(
    exported: ExportedStep,
    dimensions: Dimensions,
    degree: int | None,
    wanted: Mapping[str, int] | None,
    *,
    experts: bool,
) -> tuple[Region, ...]:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up;
    whole experts come before anything else. See :func:`~planner.tracing.sharding.split.split_step`.

    Returns:
        Regions without common operations, in executable order.
    """
    order = {node: index for index, node in enumerate(dimensions.axes)}
    rows: dict[DimensionClass, list[tuple[fx.Node, Axis]]] = defaultdict(list)
    for node, axes in dimensions.axes.items():
        for axis in axes:
            for member in axis.members[:1]:
                rows[dimensions.class_of[member]].append((node, axis))
    gain = {
        found: sum(_work(node, axis) for node, axis in rows[found])
        for found in rows
        if _is_splittable(found, degree) and (experts or not found.experts)
    }
    if wanted is not None:
        named = _wanted_classes(exported, dimensions, wanted, gain, degree)
        gain = {found: gain[found] or 1 for found in named}

    def rank(found: DimensionClass) -> tuple[bool, int, int]:
        return not found.experts, -gain[found], order[rows[found][0][0]]

    regions: list[Region] = []
    for found in sorted((found for found in gain if gain[found]), key=rank):
        region = _region(found, rows[found])
        if all(region.nodes.isdisjoint(other.nodes) for other in regions):
            regions.append(region)
    return tuple(sorted(regions, key=lambda region: min(map(order.__getitem__, region.nodes))))


def _is_splittable(found: DimensionClass, degree: int | None) -> bool:
    has_parameter = any(node.op == "get_attr" for node, _ in found.parts)
    return has_parameter and not found.obstacles and found.fits(degree)


def _work(node: fx.Node, axis: Axis) -> int:
    """Return multiplications of a product along an axis, and a table's elements."""
    name = operator_name(node)
    if name in MATRIX_PRODUCTS:
        factor = next(n for n in node.all_input_nodes if len(shape_of(n)) > 1)
        return prod(shape_of(node)) * shape_of(factor)[-1]
    if name == "embedding" and not axis.outputs:
        rows, width = shape_of(axis.inputs[0][0])
        return rows * width if rows > _looked_up(node) else 0
    return 0


def _looked_up(node: fx.Node) -> int:
    """Return how many rows of a table a sample looks up; by a constant index, it may be all."""
    table, index = node.all_input_nodes[:2]
    ahead, seen = [index], {index}
    while ahead:
        ahead += (new := set(ahead.pop().all_input_nodes) - seen)
        seen |= new
    is_constant = all(value.op != "placeholder" for value in seen)
    return shape_of(table)[0] if is_constant else prod(shape_of(index)[1:])


def _region(found: DimensionClass, rows: Sequence[tuple[fx.Node, Axis]]) -> Region:
    nodes = frozenset(node for node, _ in rows)
    made = {node for node, axis in rows if not axis.outputs}
    sums = frozenset(node for node in made if operator_name(node) != "cross_entropy_loss")
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


def unsplit_reasons(
    exported: ExportedStep, dimensions: Dimensions, regions: Sequence[Region], degree: int | None
) -> dict[str, str]:
    """Return why each parameter with two dimensions or more is not split, by its name."""
    split = {node for region in regions for node, _ in region.parts}
    reasons: dict[str, str] = {}
    for name, (node, *_) in tied_nodes(exported).items():
        found = [
            f"dimension {own}: {_reason(dimensions.class_of[node, own], degree)}"
            for own in range(len(shape_of(node)))
            if (node, own) in dimensions.class_of
        ]
        if len(shape_of(node)) > 1 and node not in split and found:
            reasons[name] = "; ".join(found)
    return reasons


def _reason(found: DimensionClass, degree: int | None) -> str:
    if found.obstacles:
        return found.obstacles[0]
    if not found.fits(degree):
        sizes = [str(size) for size in found.sizes if size % (degree or 2)]
        return f"size {', '.join(sizes)} {INDIVISIBLE} {degree or 2}"
    return "no matrix product would be split, or those that would are split better"


def _wanted_classes(
    exported: ExportedStep,
    dimensions: Dimensions,
    wanted: Mapping[str, int],
    splittable: Collection[DimensionClass],
    degree: int | None,
) -> Collection[DimensionClass]:
    """Return the classes that hold what is wanted, and no other weight."""
    name_of = {node: name for name, nodes in tied_nodes(exported).items() for node in nodes}
    named = {name: node for node, name in name_of.items() if name in wanted}
    class_of = {name: dimensions.class_of[node, wanted[name]] for name, node in named.items()}
    problems = [
        f"plan: dimension {wanted[name]} of {name!r} cannot be split: {_reason(found, degree)}; "
        "leave its module out"
        for name, found in class_of.items()
        if found not in splittable
    ]
    problems += [
        f"plan: dimension {own} of {name!r} is split together with what the plan splits; "
        "name its module too, with the style for that"
        for found in class_of.values()
        for name, own in _weights(found, name_of)
        if wanted.get(name) != own
    ]
    if problems:
        raise PipeplanError(dict.fromkeys(problems))
    return dict.fromkeys(class_of.values())


def _weights(found: DimensionClass, name_of: Mapping[fx.Node, str]) -> Iterator[tuple[str, int]]:
    for node, own in found.parts:
        if node in name_of and len(shape_of(node)) > 1:
            yield name_of[node], own
