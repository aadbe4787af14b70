"""Choice of what is split: regions, each a class of dimensions that no operation needs whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE
from planner.tracing.export import ExportedStep
from planner.tracing.operators import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, tied_nodes
from planner.tracing.sharding.notation import Axis
from planner.tracing.sharing import operator_name, shape_of


def choose(
    candidates: Iterable[DimensionClass], degree: int | None, *, is_wanted: bool
) -> list[DimensionClass]:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up,
    or if the user wants all ``candidates``; whole experts come before anything else. The regions
    are in executable order.
    """
    gain = {
        found: sum(_work(node, axis) for node, axis in found.rows) or int(is_wanted)
        for found in candidates
        if is_splittable(found, degree)
    }

    def rank(found: DimensionClass) -> tuple[bool, int, fx.Node]:
        return not found.experts, -gain[found], found.rows[0][0]

    regions: list[DimensionClass] = []
    for found in sorted((found for found in gain if gain[found]), key=rank):
        if all(found.nodes.isdisjoint(other.nodes) for other in regions):
            regions.append(found)
    return sorted(regions, key=lambda region: region.rows[0][0])


def is_splittable(found: DimensionClass, degree: int | None) -> bool:
    """Return whether a class has a parameter and can be split."""
    has_parameter = any(node.op == "get_attr" for node, _ in found.parts)
    return has_parameter and bool(found.rows) and not found.obstacles and found.fits(degree)


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


def unsplit_reasons(
    exported: ExportedStep,
    dimensions: Dimensions,
    regions: Collection[DimensionClass],
    degree: int | None,
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


def wanted_classes(
    exported: ExportedStep, dimensions: Dimensions, wanted: Mapping[str, int], degree: int | None
) -> Collection[DimensionClass]:
    """Return the classes that hold dimensions of weights, by name, and no other weight.

    Raises:
        PipeplanError: if one of them cannot be split, or not without something else.
    """
    tied = tied_nodes(exported)
    name_of = {node: name for name, nodes in tied.items() for node in nodes}
    places = {name: (tied[name][0], own) for name, own in wanted.items() if name in tied}
    class_of = {name: dimensions.class_of[place] for name, place in places.items()}
    problems = [
        f"plan: dimension {wanted[name]} of {name!r} cannot be split: {_reason(found, degree)}; "
        "leave its module out"
        for name, found in class_of.items()
        if not is_splittable(found, degree)
    ]
    problems += [
        f"plan: dimension {own} of {name_of[node]!r} is split together with what the plan splits; "
        "name its module too, with the style for that"
        for found in class_of.values()
        for node, own in found.parts
        if node in name_of and len(shape_of(node)) > 1 and wanted.get(name_of[node]) != own
    ]
    if problems:
        raise PipeplanError(dict.fromkeys(problems))
    return dict.fromkeys(class_of.values())
