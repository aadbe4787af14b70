"""How the layers of a model split over a tensor-parallel group, as data.

Bytes and FLOPs are those of one microbatch, and whole: of all members of a group together. A degree
is offered if it divides every size of a region; a region with another size is whole at that degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from planner.model.figures import (
    Collective,
    LayerFigures,
    MeasuredTimes,
    Name,
    Product,
    Size,
    Work,
)
from planner.records.document import Count, Record, left_out


class SplitParameter(Record):
    """A parameter of which every member has a share.

    Attributes:
        name: Fully qualified name.
        dimension: What is split.
        parts: Sizes of its parts, of each of which a member has an equal share: one, or three for a
            fused query, key and value.
    """

    name: Name
    dimension: Count
    parts: tuple[Size, ...]


RegionKind = Literal["heads", "columns", "vocabulary", "experts"]


class SplitRegion(Record):
    """Operations that are split together, between values that every member has.

    Attributes:
        kind: By what it is split: ``columns`` are columns of a product, and rows of the next one's
            weight; ``experts`` are whole ones, each with the tokens that chose it.
        layers: Layers that contain its operations.
        sizes: What a degree has to divide: heads, grouped heads, columns, vocabulary,
            experts.
        parameters: Parameters that are split.
    """

    kind: RegionKind
    layers: tuple[Name, ...]
    sizes: tuple[Size, ...]
    parameters: tuple[SplitParameter, ...]


def most_loaded(load: Sequence[float], degree: int) -> Fraction:
    """Return the rows of the member with the most, relative to the mean of all.

    Args:
        load: relative numbers of a layer's experts, not all 0.
        degree: number of members, which have the experts in order, equally many each.

    Returns:
        From 1, all have equally many, to the number of members: one has all.
    """
    exact, each = [*map(Fraction, load)], len(load) // degree
    sums = [sum(exact[k : k + each]) for k in range(0, each * degree, each)]
    return Fraction(max(sums) * degree, sum(sums))


INDIVISIBLE = "is not divisible by"
"""In the reason why a parameter is not split: another degree might split it."""


class LayerSplit(LayerFigures):
    """What of a layer each member has a share of; the rest every member has or does.

    Attributes:
        regions: Positions of its regions; empty: it is not split.
        weight_stash_bytes: Bytes of the part of the stash that a weight gradient still needs.
        work: What all members do together, by class of operation: FLOPs and traffic of what is
            shared once, of all else for every member; each operation counts once. Empty in a record
            of no degree.
        parameter_bytes: Bytes of its split parameters.
        collectives: Collectives inside the group.
        products: Matrix products, for their efficiency at the shape of a share.
        unsplit: Why a parameter is not split, by its name.
        again_bytes: Bytes of the part of what the backward makes again.
        measured: Measured times of what a group computes of the layer, without its collectives, by
            the type of its devices; used instead of the roofline.
    """

    regions: tuple[Count, ...]
    weight_stash_bytes: Count
    work: tuple[Work, ...]
    parameter_bytes: Count
    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    unsplit: dict[Name, str]
    again_bytes: Count = left_out(0)
    measured: dict[Name, MeasuredTimes] = left_out({})

    @property
    def indivisible(self) -> dict[str, str]:
        """Why parameters are whole on every member that another degree would split, by name."""
        return {name: reason for name, reason in self.unsplit.items() if INDIVISIBLE in reason}


class BoundarySplit(Record):
    """How a tensor between two layers is placed.

    Attributes:
        name: Name of the tensor.
        placement: ``whole`` on every member; ``positions``: a share of the positions each;
            ``region``: inside a region, which a cut here would divide.
        dimension: Dimension that is shared; null: none.
    """

    name: Name
    placement: Literal["whole", "positions", "region"]
    dimension: Count | None = None


class SplitRecord(Record):
    """How a model splits.

    Attributes:
        degree: Number of members; null: whatever some degree divides.
        sequence: Whether values between regions are shared by positions.
        regions: What is split, in executable order.
        layers: Layers, in executable order.
        boundaries: Tensors between layers.
        summed_parameters: Parameters that every member has but with a partial gradient: they are
            summed over the group once an iteration.
        experts: Whether members have whole experts, instead of a share of each.
        expert_load: Relative number of tokens that each expert of a layer gets, for which the
            figures are: of all layers with experts, or of each; empty: equally many.
    """

    degree: Size | None
    sequence: bool
    regions: tuple[SplitRegion, ...]
    layers: tuple[LayerSplit, ...]
    boundaries: tuple[BoundarySplit, ...]
    summed_parameters: tuple[Name, ...]
    experts: bool = left_out(False)
    expert_load: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] = left_out(())

    @property
    def parameters(self) -> dict[str, SplitParameter]:
        """The parameters of which every member has a share, by name."""
        return {row.name: row for region in self.regions for row in region.parameters}
