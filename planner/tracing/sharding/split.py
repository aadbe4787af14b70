"""How an exported training step splits over a group of devices: the most work is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE, SplitParameter
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.measure import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions
from planner.tracing.sharding.notation import COMBINE, Axis
from planner.tracing.sharding.placements import (
    Placements,
    Share,
    place,
    with_positions,
    with_summed,
)
from planner.tracing.sharing import operator_name, shape_of, written_by


@dataclass(frozen=True)
class Split:
    """A step's split.

    Attributes:
        degree: number of ranks.
        dimensions: the classes of dimensions behind it.
        regions: what is split, in executable order.
        placements: forms of every value.
        unsplit: why a parameter with two dimensions or more is not split, by its name.
        parameters: the split parameters, by name.
        summed: names of whole parameters whose gradients are summed over the group once a step.
    """

    degree: int
    dimensions: Dimensions
    regions: Sequence[DimensionClass]
    placements: Placements
    unsplit: Mapping[str, str]
    parameters: Mapping[str, SplitParameter]
    summed: frozenset[str]


def split_step(
    exported: ExportedStep,
    layers: LayerAssignment,
    degree: int,
    *,
    sequence: bool = False,
    experts: bool = False,
) -> Split:
    """Find how a step splits: the most work with the least communication.

    Args:
        exported: the step.
        layers: layers of its operations.
        degree: number of devices.
        sequence: whether values between regions are shared by positions.
        experts: whether whole experts are given out.

    Raises:
        PipeplanError: if the step writes into a value that it reads again.
    """
    dimensions = Dimensions(exported)
    _refuse_values_written_again(dimensions)
    regions = _chosen((row for row in dimensions.classes if experts or not row.experts), degree)
    known = Placements(
        layers.layer_of,
        nodes_with_gradient(exported),
        {node: region for region in regions for node in region.nodes},
        {n: Share(own, parts) for r in regions for (n, own), parts in r.parts.items()},
    )
    # Rows of experts that go back to shares of tokens are no sums of ranks there.
    made = {n: sequence and operator_name(n) == COMBINE for r in regions for n in r.sums}
    found = place(dimensions, known, made)
    found = with_positions(exported, found, degree) if sequence else found
    found = with_summed(found, dimensions.tied.values())
    parameters, unsplit, summed = {}, {}, set()
    for name, (node, *_) in dimensions.tied.items():
        if node in found.shares:
            dimension, parts = found.shares[node].place(node)
            parameters[name] = SplitParameter(name=name, dimension=dimension, parts=parts)
        elif len(shape_of(node)) > 1 and (reasons := _reasons(node, dimensions, degree)):
            unsplit[name] = reasons
        if node in found.summed:
            summed.add(name)
    return Split(degree, dimensions, regions, found, unsplit, parameters, frozenset(summed))


def _refuse_values_written_again(dimensions: Dimensions) -> None:
    """Refuse writes into values that are read afterwards: a rank may read another copy."""
    for node in dimensions.data:
        for value in written_by(node) if node.op == "call_function" else ():
            later = [user.name for user in value.users if user is not node and node < user]
            if value in dimensions.data and later:
                raise PipeplanError(
                    f"operation {node.target} writes into {value.name!r}, which {later[0]!r} reads "
                    "afterwards; such a model cannot be split, return a new tensor there"
                )


def _reasons(parameter: fx.Node, dimensions: Dimensions, degree: int) -> str:
    """Return why a parameter is not split, dimension by dimension."""
    found = []
    for own in range(len(shape_of(parameter))):
        if (row := dimensions.class_of.get((parameter, own))) is None:
            continue
        reason = "no matrix product would be split, or those that would are split better"
        if row.obstacles:
            reason = row.obstacles[0]
        elif not row.fits(degree):
            sizes = [str(size) for size in row.sizes if size % degree]
            reason = f"size {', '.join(sizes)} {INDIVISIBLE} {degree}"
        found.append(f"dimension {own}: {reason}")
    return "; ".join(found)


# --- choice of regions ----------------------------------------------------------------------------


def _chosen(candidates: Iterable[DimensionClass], degree: int) -> list[DimensionClass]:
    """Choose regions: those with the most work first, as long as no operation is in two.

    A class is worth it if it has a matrix product, or a table of more rows than a sample looks up;
    whole experts come before anything else. The regions are in executable order.
    """
    gain: dict[DimensionClass, int] = {}
    for found in candidates:
        has_parameter = any(node.op == "get_attr" for node, _ in found.parts)
        if has_parameter and not found.obstacles and found.fits(degree):
            gain[found] = sum(_work(node, axis) for node, axis in found.rows)

    def rank(found: DimensionClass) -> tuple[bool, int, fx.Node]:
        return not found.experts, -gain[found], found.rows[0][0]

    regions: list[DimensionClass] = []
    for found in sorted((found for found in gain if gain[found]), key=rank):
        if all(found.nodes.isdisjoint(other.nodes) for other in regions):
            regions.append(found)
    return sorted(regions, key=lambda region: region.rows[0][0])


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
