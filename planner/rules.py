"""Rules of a job that its plans have to keep, beyond the freedoms of its space."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from planner.records.document import MOST_ENTRIES, Record

Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=MOST_ENTRIES)
]


class Rules(Record):
    """What a plan must not do, although the job's freedoms would let it.

    A bound on the job's space without rules holds with them, not the other way round.

    Attributes:
        most_nodes: Most nodes that hold a stage; null: no limit. The node of ``n0/gpu3`` is ``n0``;
            a device whose name has none is a node of its own.
        most_price_per_hour: Most that the devices of all stages may cost an hour, in the cluster's
            currency; null: no limit.
        together: Sets of layers that belong in one stage.
        apart: Sets of devices of which no two hold the same stage.
        place: For some layers, the nodes and devices that may hold their stage.
    """

    most_nodes: Annotated[int, Field(ge=1)] | None = None
    most_price_per_hour: Annotated[float, Field(gt=0)] | None = None
    together: Annotated[tuple[Names, ...], Field(max_length=MOST_ENTRIES)] = ()
    apart: Annotated[tuple[Names, ...], Field(max_length=MOST_ENTRIES)] = ()
    place: dict[str, Names] = Field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it rules nothing out."""
        return self == Rules()
