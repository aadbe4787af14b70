"""The provenance of a predicted time: which fractions are measured, published and assumed.

The time is that of the critical path. Every step counts as the weakest of its figures:

- An operation: a layer's time is measured where the layer has measured times on that device type.
  Elsewhere it is the roofline's and counts as the source of the type's figures. With figures of a
  datasheet, time set by memory bandwidth counts as datasheet and time set by throughput as assumed,
  because the efficiency is an assumption.
- A message or an all-reduce: the weakest source of all links that it crosses; for an all-reduce
  these are the links between neighbours of its ring.
- The collectives of an operation whose weights replicas divide: as an all-reduce.
- An optimizer step: the source of the device type, since it is limited by memory bandwidth; and a
  copy of an offloaded stash, since the host link is one of the type's figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from planner.cluster.hardware import DeviceType, Source
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import layer_times
from planner.model.graph_record import Layer
from planner.model.length_graph import layer_at
from planner.plan.plan import TimeProvenance
from planner.simulation.critical_path import PathStep, critical_path
from planner.simulation.timeline import (
    CopyEvent,
    OperationEvent,
    OptimizerEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)

WEAKEST_FIRST: tuple[Source, ...] = ("assumed", "datasheet", "measured")
Fractions = Mapping[Source, float]
_PARTS = {"F": "F", "I": "I", "W": "W", "B": "IW"}
_SLIGHTLY = 1 - 1e-6
"""A device slower by this factor takes longer only where throughput sets the time."""


def time_provenance(timeline: Timeline) -> TimeProvenance | None:
    """Return the fractions of a replay's iteration time by source; None if it takes no time."""
    return path_time_provenance(timeline.pipeline, critical_path(timeline))


def path_time_provenance(
    pipeline: PlacedPipeline, path: Sequence[PathStep]
) -> TimeProvenance | None:
    """Return the fractions of the time of a critical path by source; None if it takes no time."""
    total_s = sum(step.seconds for step in path)
    if total_s <= 0:
        return None
    sources = _StepSources(pipeline)
    found: dict[Source, float] = dict.fromkeys(WEAKEST_FIRST, 0.0)
    for step in path:
        for source, fraction in sources.of(step).items():
            found[source] += fraction * step.seconds
    whole_s = sum(found.values())
    return TimeProvenance.model_validate({name: min(1.0, s / whole_s) for name, s in found.items()})


class _StepSources:
    """The sources of the times of a pipeline's steps."""

    def __init__(self, pipeline: PlacedPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.problem.cluster
        self._operations: dict[tuple[int, str, str], Fractions] = {}

    def of(self, step: PathStep) -> Fractions:
        """Return the fractions of a step's time by source; they sum to 1."""
        match step.event:
            case OperationEvent(device, operation):
                return self._operation(operation.stage, operation.kind, device)
            case TransferEvent() as transfer:
                return {self._links([transfer.source, transfer.target]): 1.0}
            case SynchronisationEvent(synchronisation):
                devices = synchronisation.devices
                return {self._links([*devices, devices[0]]): 1.0}
            case OptimizerEvent(device) | CopyEvent(device):
                return {self._cluster.device_type(device).source: 1.0}

    def _operation(self, stage: int, kind: str, device: str) -> Fractions:
        type_name = self._cluster.type_of(device)
        key = stage, kind, type_name
        if key not in self._operations:
            found: dict[Source, float] = {}
            for source, seconds in self._parts(stage, kind, type_name):
                found[source] = found.get(source, 0.0) + seconds
            self._operations[key] = _normalised(found)
        return self._operations[key]

    def _parts(self, stage: int, kind: str, type_name: str) -> Iterator[tuple[Source, float]]:
        spec, problem = self._pipeline.stages[stage].spec, self._pipeline.problem
        device, recomputed = self._cluster.device_types[type_name], set(spec.recompute)
        own = problem.graph.on(type_name).layers
        layers = (own[name] for name in spec.layers)
        for name, layer, share in ((row.name, *part) for row in layers for part in _by_length(row)):
            if type_name in layer.measured:
                alone = layer.model_copy(update={"collectives": ()})
                computed_s, whole_s = (
                    layer_times(
                        row, type_name, device, problem.job.precision, name in recomputed
                    ).seconds(kind)
                    for row in (alone, layer)
                )
                yield "measured", share * computed_s
                yield device.source, share * (whole_s - computed_s)
                continue
            if kind == "F":
                yield device.source, share * device.load_s(layer.batch_bytes)
            # A layer that runs again adds its forward to its backward and input gradient.
            repeated = "F" if name in recomputed and kind in "BI" else ""
            parts = _roofline_parts(
                layer, type_name, device, problem.job.precision, _PARTS[kind] + repeated
            )
            yield from ((source, share * seconds) for source, seconds in parts)
        placed = self._pipeline.stages[stage]
        if placed.collective_s:
            ring = sorted(spec.devices, key=self._cluster.numbers.__getitem__)
            each_s = (row.in_operation(kind) for row in placed.collective_s.values())
            yield self._links([*ring, ring[0]]), sum(each_s)

    def _links(self, devices: Sequence[str]) -> Source:
        """Return the weakest source of all links between neighbours."""
        routes = (self._cluster.route(*ends) for ends in pairwise(devices))
        found = {
            self._cluster.links[index].source
            for route in routes
            if route is not None
            for index in route.crossed
        }
        return next((source for source in WEAKEST_FIRST if source in found), "measured")


def _by_length(layer: Layer) -> list[tuple[Layer, float]]:
    """Return a layer at each length of microbatches with its share; itself if there is one."""
    return [(layer_at(layer, row), row.share) for row in layer.lengths] or [(layer, 1.0)]


def _roofline_parts(
    layer: Layer, type_name: str, device: DeviceType, precision: str, kinds: str
) -> Iterator[tuple[Source, float]]:
    """Yield the source and the seconds of each of a layer's operations under the roofline.

    Collectives inside a group are of the source of its devices. The wait for the loader is left
    out.
    """
    device = device.model_copy(update={"loader_gb_per_s": None})
    with_collectives = layer_times(layer, type_name, device, precision)
    layer = layer.model_copy(update={"collectives": ()})
    times = layer_times(layer, type_name, device, precision)
    peaks = {name: peak * _SLIGHTLY for name, peak in device.peak_tflop_per_s.items()}
    slower = layer_times(
        layer, type_name, device.model_copy(update={"peak_tflop_per_s": peaks}), precision
    )
    for kind in kinds:
        seconds = times.seconds(kind)
        takes_throughput = slower.seconds(kind) > seconds
        assumed = device.source == "datasheet" and takes_throughput
        yield "assumed" if assumed else device.source, seconds
        yield device.source, with_collectives.seconds(kind) - seconds


def _normalised(seconds: Mapping[Source, float]) -> Fractions:
    """Return fractions of the sum; an operation of no length counts as measured."""
    total = sum(seconds.values())
    if not total:
        return {"measured": 1.0}
    return {source: part / total for source, part in seconds.items()}
