"""How an exported training step splits over a group of devices: the most work is split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import INDIVISIBLE
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.measure import MATRIX_PRODUCTS
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions
from planner.tracing.sharding.notation import Axis
from planner.tracing.sharding.placements import Split as Split
from planner.tracing.sharding.placements import with_positions, with_sums
from planner.tracing.sharing import operator_name, shape_of, written_by


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
    gradients = nodes_with_gradient(exported)
    found = Split(degree, dimensions, regions, layers.layer_of, gradients)
    found = with_sums(found, sequence=sequence)
    return with_positions(exported, found) if sequence else found


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


def unsplit_parameters(split: Split) -> dict[str, str]:
    """Return why a parameter with two dimensions or more is not split, by its name."""
    whole = {
        name: "; ".join(_reasons(node, split))
        for name, (node, *_) in split.dimensions.tied.items()
        if node not in split.shares and len(shape_of(node)) > 1
    }
    return {name: reasons for name, reasons in whole.items() if reasons}


def _reasons(parameter: fx.Node, split: Split) -> Iterator[str]:
    """Yield why a parameter is not split, dimension by dimension."""
    for own in range(len(shape_of(parameter))):
        if (row := split.dimensions.class_of.get((parameter, own))) is None:
            continue
        reason = "no matrix product would be split, or those that would are split better"
        if row.obstacles:
            reason = row.obstacles[0]
        elif not row.fits(split.degree):
            sizes = [str(size) for size in row.sizes if size % split.degree]
            reason = f"size {', '.join(sizes)} {INDIVISIBLE} {split.degree}"
        yield f"dimension {own}: {reason}"


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
