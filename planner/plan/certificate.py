"""What a plan carries to show that its bound holds: numbers that anyone can check."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.records.document import Count, Record
from planner.space import Space

MOST_DEVICES = 4096
"""Devices and types that a certificate may name."""
MOST_PRICES = 100_000
"""Layers that a certificate may have prices of."""
Seconds = Annotated[float, Field(gt=0, le=1e30)]
Price = Annotated[float, Field(ge=0, le=1e30)]


class WorkPrices(Record):
    """All work, paid at a price of a second on each device type, exceeds what a time can buy.

    Attributes:
        kind: ``work``.
        prices: Price of a second on each device type, in any unit.
    """

    kind: Literal["work"] = "work"
    prices: Annotated[dict[str, Price], Field(min_length=1, max_length=MOST_DEVICES)]


class MicrobatchPath(Record):
    """One microbatch's way through all layers and back takes so long on the fastest types.

    Attributes:
        kind: ``path``.
    """

    kind: Literal["path"] = "path"


class LikeDevices(Record):
    """No sequence of stages keeps the time, if all devices of a class count as alike.

    Attributes:
        kind: ``classes``.
        classes: All devices of the cluster, in classes of one type each.
    """

    kind: Literal["classes"] = "classes"
    classes: Annotated[
        tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...],
        Field(min_length=1, max_length=MOST_DEVICES),
    ]


class TypePrices(Record):
    """No sequence of stages keeps the time on devices that all of the cluster's prices pay for.

    Attributes:
        kind: ``budget``.
        prices: Price of a device of each type, in any unit.
    """

    kind: Literal["budget"] = "budget"
    prices: Annotated[dict[str, Price], Field(min_length=1, max_length=MOST_DEVICES)]


class LayerPrices(Record):
    """No devices, each with up to two stages, earn as much as all layers pay.

    Attributes:
        kind: ``columns``.
        prices: That each layer pays for a microbatch, in the order of the layer graph, in any unit.
    """

    kind: Literal["columns"] = "columns"
    prices: Annotated[tuple[Price, ...], Field(min_length=1, max_length=MOST_PRICES)]


Argument = Annotated[
    WorkPrices | MicrobatchPath | LikeDevices | TypePrices | LayerPrices,
    Field(discriminator="kind"),
]
"""The reason why no plan is faster than a bound; ``docs/proofs.md`` has what each one proves."""


class Certificate(Record):
    """A proof that no plan of a space is faster than a bound, for one problem.

    Attributes:
        bound_s: What is proved: no plan takes less.
        argument: Why, with its numbers.
        space: Plans that it is about.
        problem_digest: Digest of the problem, see ``provenance.problem_digest``.
        cost_model: Revision of the cost model.
    """

    bound_s: Seconds
    argument: Argument
    space: Space
    problem_digest: str
    cost_model: Count


class UncheckedBound(Record):
    """A bound above the certificate's that nobody can check without the search that found it.

    Attributes:
        bound_s: No plan takes less, says its source.
        source: ``solver``: CP-SAT.
        method: The step of the search that found it.
    """

    bound_s: Seconds
    source: Literal["solver"]
    method: str


class Proof(Record):
    """What stands behind the lower bound of a plan.

    Attributes:
        certificate: What `pipeplan verify --prove` checks; null if there is none.
        unchecked: A higher bound without a certificate; null if the certificate alone proves the
            bound.
    """

    certificate: Certificate | None = None
    unchecked: UncheckedBound | None = None
