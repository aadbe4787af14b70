"""Choice of what is split: regions, each a class of dimensions that no operation needs whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from torch import fx

from planner.model.split_record import INDIVISIBLE
from planner.tracing.export import ExportedStep
from planner.tracing.measure import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, tied_nodes
from planner.tracing.sharding.notation import Axis
from planner.tracing.sharing import operator_name, shape_of


def choose(candidates: Iterable[DimensionClass], degree: int) -> list[DimensionClass]:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up;
    whole experts come before anything else. The regions are in executable order.
    """
    gain = {
        found: sum(_work(node, axis) for node, axis in found.rows)
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


def is_splittable(found: DimensionClass, degree: int) -> bool:
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
    degree: int,
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


def _reason(found: DimensionClass, degree: int) -> str:
    if found.obstacles:
        return found.obstacles[0]
    if not found.fits(degree):
        sizes = [str(size) for size in found.sizes if size % degree]
        return f"size {', '.join(sizes)} {INDIVISIBLE} {degree}"
    return "no matrix product would be split, or those that would are split better"
