"""How an exported training step splits over a group of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import fx

from planner.errors import PipeplanError
from planner.model.tracing.sharding.dimensions import Dimensions, Parts, dimensions_of
from planner.model.tracing.sharding.placements import Placements, place
from planner.model.tracing.sharding.regions import Region, choose
from planner.model.tracing.sharding.sequence import share_positions
from planner.model.tracing.sharding.user_plan import Wanted
from planner.tracing.export import ExportedStep
from planner.tracing.gradients import nodes_with_gradient
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharing import written_by


@dataclass(frozen=True)
class Split:
    """A step's split.

    Attributes:
        dimensions: the classes of dimensions behind it.
        regions: what is split.
        placements: placement of every value.
        unsplit: why a parameter with two dimensions or more is not split, by its name.
        parameters: dimension and parts of each split parameter, by its name.
        layer_of: layer of each operation.
        gradients: values that the backward reaches.
    """

    dimensions: Dimensions
    regions: tuple[Region, ...]
    placements: Placements
    unsplit: Mapping[str, str]
    parameters: Mapping[str, tuple[int, Parts]]
    layer_of: Mapping[fx.Node, str]
    gradients: frozenset[fx.Node]


def split_step(
    exported: ExportedStep,
    layers: LayerAssignment,
    degree: int | None = None,
    *,
    sequence: bool = False,
    experts: bool = False,
    wanted: Wanted | None = None,
) -> Split:
    """Find how a step splits: the most work with the least communication.

    Args:
        exported: the step.
        layers: layers of its operations.
        degree: number of devices; None: every split that some degree divides.
        sequence: whether values between regions are shared by positions.
        experts: whether whole experts are given out.
        wanted: the user's own split, instead of the best.

    Raises:
        PipeplanError: if that cannot be, or if the step writes into a value that it reads again.
    """
    dimensions = dimensions_of(exported)
    _refuse_values_written_again(dimensions.data)
    order = {node: index for index, node in enumerate(exported.graph.nodes)}
    choice = choose(exported, dimensions, order, degree, wanted, experts=experts)
    gradients = nodes_with_gradient(exported)
    share = partial(share_positions, exported, degree=degree) if sequence else None
    placements = place(dimensions, choice.regions, layers.layer_of, gradients, share)
    parameters = _parameters(exported, choice.regions)
    return Split(
        dimensions,
        choice.regions,
        placements,
        choice.unsplit,
        parameters,
        layers.layer_of,
        gradients,
    )


def _refuse_values_written_again(data: Mapping[fx.Node, None]) -> None:
    """Refuse writes into values that are read afterwards: a rank may read another copy."""
    for node in data:
        for value in written_by(node) if node.op == "call_function" else ():
            later = [user.name for user in value.users if user is not node and node < user]
            if value in data and later:
                raise PipeplanError(
                    f"operation {node.target} writes into {value.name!r}, which {later[0]!r} reads "
                    "afterwards; such a model cannot be split, return a new tensor there"
                )


def _parameters(
    exported: ExportedStep, regions: tuple[Region, ...]
) -> dict[str, tuple[int, Parts]]:
    return {
        exported.names[str(node.target)]: (own, parts)
        for region in regions
        for (node, own), parts in region.parts.items()
        if node.op == "get_attr" and str(node.target) in exported.names
    }
