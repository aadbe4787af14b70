"""Lower bounds of single devices and links: no order of the same operations is faster.

The replica of every microbatch is taken as it is. A device or link has to wait for its first
work (head), to do all of it (load), and what follows its last work takes time as well (tail).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from planner.costs.path_bounds import PathBounds
from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind
from planner.simulation.timeline import Timeline, TransferEvent


@dataclass(frozen=True)
class Resource:
    """A device or a link, and the least time in which it can do its part; seconds.

    Attributes:
        kind: whether it computes or carries.
        name: of the device or the link.
        stages: a device holds.
        head_s: until its first work can be there, at least.
        load_s: its work: operations, or transfers that hold the link. Of a link all its transfers,
            or those of one tensor if these, between a later head and tail, give a higher bound.
        tail_s: from the end of its work to the end of the iteration, at least.
    """

    kind: Literal["device", "link"]
    name: str
    stages: tuple[int, ...]
    head_s: float
    load_s: float
    tail_s: float

    @property
    def bound_s(self) -> float:
        """No order of the same operations on the same devices takes less."""
        return self.head_s + self.load_s + self.tail_s


def resource_bounds(timeline: Timeline) -> tuple[Resource, ...]:
    """Return bounds of all devices and of all links in use, the highest first."""
    found = [*_devices(timeline), *_links(timeline)]
    return tuple(sorted(found, key=lambda row: (-row.bound_s, row.kind, row.name)))


def _devices(timeline: Timeline) -> list[Resource]:
    pipeline = timeline.pipeline
    load_s, weights_s = dict.fromkeys(pipeline.devices, 0.0), defaultdict[str, float](float)
    for event in timeline.operations:
        # Alone: in another order the device may be slowed less.
        seconds = pipeline.seconds(event.operation.stage, event.operation.kind, event.device)
        load_s[event.device] += seconds
        if event.operation.kind == "W":
            weights_s[event.device] += seconds
    ways = _ways(timeline)
    return [
        _device(pipeline, device, load_s[device], weights_s[device], ways)
        for device in pipeline.devices
    ]


def _ways(timeline: Timeline) -> PathBounds:
    """Return path bounds with the shortest backwards that send gradients on."""
    split = any(event.operation.kind == "I" for event in timeline.operations)
    return PathBounds(timeline.pipeline, split)


def _device(
    pipeline: PlacedPipeline,
    device: str,
    load_s: float,
    weights_s: float,
    ways: PathBounds,
) -> Resource:
    stages, step_s = pipeline.stages_on[device], pipeline.optimizer_s[device]
    if load_s == 0:
        return Resource("device", device, stages, 0.0, 0.0, step_s)
    if len(stages) > 1:
        return Resource("device", device, stages, ways.head[stages[0]], load_s, step_s)
    (stage,) = stages
    # Weight gradients can be put off until the last gradient is on its way back.
    tail_s = max(pipeline.tail_s(stage, device), ways.gradients_drain[stage] - weights_s)
    return Resource("device", device, stages, ways.head[stage], load_s, tail_s)


def _links(timeline: Timeline) -> list[Resource]:
    crossing: defaultdict[tuple[int, int], list[TransferEvent]] = defaultdict(list)
    for event in timeline.transfers:
        for link in event.links:
            crossing[link].append(event)
    ways = _ways(timeline)
    return [_link(link, events, ways) for link, events in crossing.items()]


def _link(link: tuple[int, int], events: list[TransferEvent], ways: PathBounds) -> Resource:
    """Bound a link by all its transfers, or by those of one tensor alone where that is higher."""
    by_tensor: defaultdict[tuple[int, Kind], list[TransferEvent]] = defaultdict(list)
    for event in events:
        by_tensor[event.operation.stage, event.operation.kind].append(event)
    found = [_carried(link, events, [*by_tensor], ways)]
    found += [_carried(link, alone, [tensor], ways) for tensor, alone in by_tensor.items()]
    return max(found, key=lambda resource: resource.bound_s)


def _carried(
    link: tuple[int, int],
    events: list[TransferEvent],
    tensors: list[tuple[int, Kind]],
    ways: PathBounds,
) -> Resource:
    return Resource(
        kind="link",
        name=ways.pipeline.problem.cluster.link_name(link),
        stages=(),
        head_s=min(_before_s(ways, *tensor) for tensor in tensors),
        load_s=_load_s(ways.pipeline, link, events),
        tail_s=min(_after_s(ways, *tensor) for tensor in tensors),
    )


def _load_s(pipeline: PlacedPipeline, link: tuple[int, int], events: list[TransferEvent]) -> float:
    """Return the least time in which a link carries messages; those of a pair go in turn."""
    of_pair: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        of_pair[event.source, event.target] += event.transfer.seconds
    moved = sum((x.seconds - x.latency_s) * x.gb_per_s for x in (row.transfer for row in events))
    width = pipeline.problem.cluster.links[link[0]].bandwidth_gb_per_s
    return max(moved / width, *of_pair.values())


def _before_s(ways: PathBounds, stage: int, kind: Kind) -> float:
    """Return the least time until the stage's activations (F) or gradients (B) can be sent."""
    made_s = ways.forward[stage] if kind == "F" else ways.round_trip[stage]
    return ways.head[stage] + made_s


def _after_s(ways: PathBounds, stage: int, kind: Kind) -> float:
    """Return the least time from their arrival to the end of the iteration."""
    if kind == "F":
        return ways.round_trip[stage + 1] + ways.gradients_drain[stage + 1]
    return ways.gradient[stage - 1] + ways.gradients_drain[stage - 1]
