"""The critical path's time by cause: computation, transfers, reductions, optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from planner.costs.placed_pipeline import PlacedPipeline
from planner.simulation.critical_path import PathStep
from planner.simulation.timeline import (
    CopyEvent,
    Event,
    OperationEvent,
    OptimizerEvent,
    SynchronisationEvent,
    TransferEvent,
)

Cause = Literal["computation", "transfers", "all-reduce", "all-gather", "optimizer", "offload"]


class Spent(NamedTuple):
    """The use of some time.

    Attributes:
        cause: the kind of work; ``offload`` is the copying of stashes over the host link.
        on: its device, the devices that reduce or gather, or the link by its name.
        stages: of a computation or a collective.
    """

    cause: Cause
    on: tuple[str, ...]
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class PathShare:
    """A part of the critical path: what on, its seconds and its share of the whole."""

    spent: Spent
    seconds: float
    share: float


def path_shares(pipeline: PlacedPipeline, path: Sequence[PathStep]) -> tuple[PathShare, ...]:
    """Return the time of a critical path by cause, the largest share first; no empty shares.

    Every step counts once: a transfer for the link that it had only a share of, else for the
    narrowest. Of several as narrow that is one which a neighbour on the path waits for, else the
    first on the way.
    """
    total_s = sum(step.seconds for step in path)
    spent: dict[Spent, float] = {}
    for step, crowded in zip(path, _crowded_links(path), strict=True):
        key = spent_on(pipeline, step.event, crowded)
        spent[key] = spent.get(key, 0.0) + step.seconds
    ranked = sorted(spent.items(), key=lambda row: (-row[1], row[0]))
    return tuple(
        PathShare(key, seconds, seconds / total_s) for key, seconds in ranked if seconds > 0
    )


def spent_on(
    pipeline: PlacedPipeline, event: Event, crowded: Collection[tuple[int, int]] = ()
) -> Spent:
    """Return what an event's time is spent on.

    Args:
        pipeline: of the timeline.
        event: of it.
        crowded: links preferred among those of a transfer that are as narrow.
    """
    match event:
        case OperationEvent(device, operation):
            return Spent("computation", (device,), (operation.stage,))
        case TransferEvent() as transfer:
            return Spent("transfers", (_bottleneck(pipeline, transfer, crowded),))
        case SynchronisationEvent(synchronisation, is_gather=is_gather):
            cause: Cause = "all-gather" if is_gather else "all-reduce"
            return Spent(cause, synchronisation.devices, synchronisation.stages)
        case OptimizerEvent(device):
            return Spent("optimizer", (device,))
        case CopyEvent(device):
            return Spent("offload", (device,))


def _crowded_links(path: Sequence[PathStep]) -> Iterable[set[tuple[int, int]]]:
    """Return for each step the links that it waited for or that the next one waits for."""
    shared: list[set[tuple[int, int]]] = [set() for _ in path]
    for index, (first, second) in enumerate(pairwise(path)):
        if isinstance(first.event, TransferEvent) and isinstance(second.event, TransferEvent):
            common = set(first.event.links) & set(second.event.links)
            shared[index] |= common
            shared[index + 1] |= common
    return shared


def _bottleneck(
    pipeline: PlacedPipeline, transfer: TransferEvent, crowded: Collection[tuple[int, int]]
) -> str:
    """Return the link that sets a transfer's pace; both ends where that is a shared one or none."""
    cluster = pipeline.problem.cluster
    if transfer.slowed_by is not None:
        return cluster.link_name(transfer.slowed_by)
    route = cluster.route(transfer.source, transfer.target)
    assert route is not None
    narrowest = [
        link
        for link in transfer.links
        if cluster.links[link[0]].bandwidth_gb_per_s == route.bandwidth_gb_per_s
    ]
    waited = [link for link in narrowest if link in crowded]
    for link in (*waited, *narrowest):
        return cluster.link_name(link)
    return f"{transfer.source}>{transfer.target}"
