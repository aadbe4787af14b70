"""The cluster as synchronisation sees it: what an iteration of a pipeline takes, and its links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from planner.errors import PipeplanError

MOST_WORKERS = 4096


@dataclass(frozen=True)
class LinkCost:
    """A message takes ``latency_s`` and its bytes over the bandwidth (Hockney 1994).

    Attributes:
        latency_s: seconds before the first byte arrives.
        bandwidth_gb_per_s: in decimal gigabytes a second.
    """

    latency_s: float
    bandwidth_gb_per_s: float

    def moving_s(self, bytes_: float) -> float:
        """Seconds that the bytes alone take."""
        return bytes_ / (self.bandwidth_gb_per_s * 1e9)

    def seconds(self, bytes_: float) -> float:
        """Seconds of a message."""
        return self.latency_s + self.moving_s(bytes_)


@dataclass(frozen=True)
class Place:
    """What one iteration is at a place of a pipeline; times are from the iteration's start.

    Attributes:
        first_forward_s: when it is needed for the first time.
        last_backward_s: when its last backward ends.
        forward_s: of its first forward, behind which parameters can still arrive.
        backward_s: of its last backward, behind which gradients can already leave.
        optimizer_s: of its optimizer step.
        parameter_bytes: that it synchronises.
        network_card: which of the pipeline's cards it uses; places on one node share one.
    """

    first_forward_s: float
    last_backward_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    parameter_bytes: int
    network_card: int = 0

    @property
    def occupied_s(self) -> float:
        """From the first forward to the end of the optimizer step."""
        return self.last_backward_s + self.optimizer_s - self.first_forward_s


@dataclass(frozen=True)
class Reduction:
    """An all-reduce, or any other collective.

    Attributes:
        seconds: from its start to its end.
        card_s: for which it holds the members' network cards.
        sent_bytes: of all members together.
    """

    seconds: float
    card_s: float
    sent_bytes: float


@dataclass(frozen=True)
class World:
    """Pipelines that train replicas of one model, and the links between them.

    A pipeline is rigid: the operations of an iteration keep their distances, a slow iteration is
    stretched as a whole, and the next one begins as soon as every place is free when its turn
    comes.

    Attributes:
        workers: number of pipelines.
        pipelines_per_node: that share a node, and so a network card; pipelines are numbered node
            by node.
        places: of a pipeline.
        within, between: links between pipelines of a node, and of different nodes.
        collective_overhead_s: that every collective takes, whatever its size.
        scheduler_round_trip_s: from a request until the answer, if nothing else delays it.
        slots: forwards and backwards one after the other in an iteration.
        slowdown: by which each pipeline's iterations take longer than ``places`` says; empty: 1.

    Raises:
        PipeplanError: naming every field that is out of range.
    """

    workers: int
    places: tuple[Place, ...]
    within: LinkCost
    between: LinkCost
    pipelines_per_node: int = 1
    collective_overhead_s: float = 0.0
    scheduler_round_trip_s: float = 2e-4
    slots: int = 2
    slowdown: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PipeplanError(problems)

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.workers <= MOST_WORKERS:
            yield f"workers: {self.workers} is not a whole number from 1 to {MOST_WORKERS}"
        if self.pipelines_per_node < 1:
            yield f"pipelines_per_node: {self.pipelines_per_node} is not a number from 1"
        if not self.places or any(not p.occupied_s > 0 for p in self.places):
            yield "places: a pipeline needs places, and an iteration some time at each of them"
        for name, link in (("within", self.within), ("between", self.between)):
            if not (link.latency_s >= 0 and link.bandwidth_gb_per_s > 0):
                yield f"{name}: {link} needs a latency from 0 and a bandwidth above 0"
        if self.slowdown and (len(self.slowdown) != self.workers or min(self.slowdown) <= 0):
            yield (
                f"slowdown: {len(self.slowdown)} factors for {self.workers} workers; give each "
                "one above 0, or none"
            )

    @cached_property
    def iteration_s(self) -> float:
        """Seconds between iterations of a pipeline that waits for nobody."""
        return max(place.occupied_s for place in self.places)

    @cached_property
    def parameter_bytes(self) -> int:
        """Of all places."""
        return sum(place.parameter_bytes for place in self.places)

    @cached_property
    def cards(self) -> int:
        """Network cards of a pipeline."""
        return max(place.network_card for place in self.places) + 1

    def node(self, worker: int) -> int:
        """The node a pipeline is on."""
        return worker // self.pipelines_per_node

    def link(self, members: tuple[int, ...]) -> LinkCost:
        """The slowest link that ascending members need."""
        return self.between if self.crosses(members) else self.within

    def crosses(self, members: tuple[int, ...]) -> bool:
        """Whether ascending members are on several nodes."""
        return self.node(members[0]) != self.node(members[-1])

    def all_reduce(self, members: tuple[int, ...], bytes_: float) -> Reduction:
        """The better of ring and tree, as :mod:`planner.costs.collectives`, on these two links.

        Nodes follow each other in the ring, so that each card carries it once each way.
        """
        link, count = self.link(members), len(members)
        if count == 1:
            return Reduction(0.0, 0.0, 0.0)
        ring = _steps(link, 2 * (count - 1), bytes_ / count)
        tree = _steps(link, 2 * math.ceil(math.log2(count)), bytes_)
        seconds, card_s = min(ring, tree)
        return Reduction(
            self.collective_overhead_s + seconds,
            card_s if self.crosses(members) else 0.0,
            2 * (count - 1) * bytes_,
        )

    def half(self, members: tuple[int, ...], bytes_: float) -> Reduction:
        """A reduce-scatter or an all-gather: one half of a ring."""
        link, count = self.link(members), len(members)
        if count == 1:
            return Reduction(0.0, 0.0, 0.0)
        seconds, card_s = _steps(link, count - 1, bytes_ / count)
        return Reduction(
            self.collective_overhead_s + seconds,
            card_s if self.crosses(members) else 0.0,
            (count - 1) * bytes_,
        )


def _steps(link: LinkCost, steps: int, bytes_: float) -> tuple[float, float]:
    """Seconds of equal steps one after the other, and of their bytes alone."""
    moving_s = steps * link.moving_s(bytes_)
    return steps * link.latency_s + moving_s, moving_s


def uniform_world(
    workers: int,
    compute_s: float,
    parameter_bytes: int,
    link: LinkCost,
    *,
    backward_share: float = 0.5,
    optimizer_s: float = 0.0,
    pipelines_per_node: int = 1,
    slots: int = 1,
) -> World:
    """Pipelines of one place on nodes with equal links: the world of data parallel training.

    Args:
        workers: number of them.
        compute_s: of forward and backward together.
        parameter_bytes: that each holds.
        link: between any two.
        backward_share: of ``compute_s``, behind which gradients can be sent.
        optimizer_s: of the optimizer step.
        pipelines_per_node: that share a network card.
        slots: of an iteration, see :class:`World`.
    """
    place = Place(
        first_forward_s=0.0,
        last_backward_s=compute_s,
        forward_s=compute_s * (1 - backward_share),
        backward_s=compute_s * backward_share,
        optimizer_s=optimizer_s,
        parameter_bytes=parameter_bytes,
    )
    return World(workers, (place,), link, link, pipelines_per_node=pipelines_per_node, slots=slots)
