"""How an exported training step splits over a group of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from planner.errors import PipeplanError
from planner.model.split_record import SplitParameter
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharding.dimensions import DimensionClass, Dimensions, tied_nodes
from planner.tracing.sharding.notation import COMBINE
from planner.tracing.sharding.placements import Placements, Share, place, with_summed
from planner.tracing.sharding.positions import with_positions
from planner.tracing.sharding.regions import choose, unsplit_reasons
from planner.tracing.sharing import operator_name, written_by


@dataclass(frozen=True)
class Split:
    """A step's split.

    Attributes:
        degree: number of ranks.
        dimensions: the classes of dimensions behind it.
        regions: what is split.
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
    dimensions, tied = Dimensions(exported), tied_nodes(exported)
    _refuse_values_written_again(dimensions)
    regions = choose([row for row in dimensions.classes if experts or not row.experts], degree)
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
    found = with_summed(found, tied.values())
    return Split(
        degree,
        dimensions,
        regions,
        found,
        unsplit_reasons(exported, dimensions, regions, degree),
        {name: _parameter(name, n, found) for name, (n, *_) in tied.items() if n in found.shares},
        frozenset(name for name, (node, *_) in tied.items() if node in found.summed),
    )


def _parameter(name: str, node: fx.Node, found: Placements) -> SplitParameter:
    dimension, parts = found.shares[node].place(node)
    return SplitParameter(name=name, dimension=dimension, parts=parts)


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
