"""What a predicted time rests on: how much of it is measured, and how much is assumed.

The time is that of the critical path, and every step of it counts as what the weakest of its
figures is:

- an operation: a layer's share is measured where the layer has measured times on that type of
  device. Elsewhere the roofline gives it from the type's figures, and it counts as their source.
  Of a datasheet's figures, the time that memory bandwidth sets counts as datasheet, the time that
  throughput sets as assumed, because the efficiency is.
- a message, or an all-reduce: the weakest source of all links that it crosses; of an all-reduce
  these are the links between neighbours of its ring.
- an optimizer step: the source of the device type, whose memory bandwidth it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from planner.artifacts.cluster import Cluster
from planner.artifacts.graph_record import Layer
from planner.artifacts.hardware import DeviceType, Source
from planner.artifacts.plan import RestsOn
from planner.costs.placement import PlacedPipeline
from planner.costs.roofline import layer_times
from planner.critical_path import OptimizerEvent, PathStep, critical_path
from planner.simulator import OperationEvent, SynchronisationEvent, Timeline, TransferEvent

WEAKEST_FIRST: tuple[Source, ...] = ("assumed", "datasheet", "measured")
Shares = Mapping[Source, float]
_HALVES = {"F": "F", "I": "I", "W": "W", "B": "IW"}
_SLIGHTLY = 1 - 1e-6
"""A device slower by this has longer times where throughput sets them, and the same elsewhere."""


def rests_on(timeline: Timeline) -> RestsOn | None:
    """Shares of the iteration time of a replay by what they rest on; None if it takes no time."""
    return rests_on_path(timeline.pipeline, critical_path(timeline))


def rests_on_path(pipeline: PlacedPipeline, path: Sequence[PathStep]) -> RestsOn | None:
    """The same of a critical path that is known."""
    total_s = sum(step.seconds for step in path)
    if total_s <= 0:
        return None
    grounds = _Grounds(pipeline)
    found: dict[Source, float] = dict.fromkeys(WEAKEST_FIRST, 0.0)
    for step in path:
        for source, share in grounds.of(step).items():
            found[source] += share * step.seconds
    whole_s = sum(found.values())
    return RestsOn.model_validate({name: min(1.0, s / whole_s) for name, s in found.items()})


class _Grounds:
    """What the steps of a replay of a pipeline rest on."""

    def __init__(self, pipeline: PlacedPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.problem.cluster
        self._operations: dict[tuple[int, str, str], Shares] = {}

    def of(self, step: PathStep) -> Shares:
        """Shares of a step's time; they sum to 1."""
        match step.event:
            case OperationEvent(device, operation):
                return self._operation(operation.stage, operation.kind, device)
            case TransferEvent() as transfer:
                return {self._links([transfer.source, transfer.target]): 1.0}
            case SynchronisationEvent(synchronisation):
                devices = synchronisation.devices
                return {self._links([*devices, devices[0]]): 1.0}
            case OptimizerEvent(device):
                return {self._cluster.device_type(device).source: 1.0}

    def _operation(self, stage: int, kind: str, device: str) -> Shares:
        type_name = self._cluster.type_of(device)
        key = stage, kind, type_name
        if key not in self._operations:
            found: dict[Source, float] = {}
            for source, seconds in self._parts(stage, kind, type_name):
                found[source] = found.get(source, 0.0) + seconds
            self._operations[key] = _of_one(found)
        return self._operations[key]

    def _parts(self, stage: int, kind: str, type_name: str) -> Iterator[tuple[Source, float]]:
        spec, problem = self._pipeline.stages[stage].spec, self._pipeline.problem
        device, again = self._cluster.device_types[type_name], set(spec.recompute)
        for name in spec.layers:
            layer = problem.graph.layers[name]
            if type_name in layer.measured:
                times = layer_times(layer, type_name, device, problem.job.precision, name in again)
                yield "measured", times.seconds(kind)
                continue
            # A layer that runs again adds its forward to its backward and input gradient.
            repeated = "F" if name in again and kind in "BI" else ""
            yield from _roofline_parts(
                layer, type_name, device, problem.job.precision, _HALVES[kind] + repeated
            )

    def _links(self, devices: Sequence[str]) -> Source:
        """The weakest source of all links between neighbours."""
        routes = (self._visible.route(*ends) for ends in pairwise(devices))
        found = {
            self._cluster.links[index].source
            for route in routes
            if route is not None
            for index, _ in route.links
        }
        return next((source for source in WEAKEST_FIRST if source in found), "measured")

    @cached_property
    def _visible(self) -> Cluster:
        """The same routes, with shared links among the links that they list."""
        if not any(link.shared for link in self._cluster.links):
            return self._cluster
        links = tuple(link.model_copy(update={"shared": False}) for link in self._cluster.links)
        return self._cluster.model_copy(update={"links": links})


def _roofline_parts(
    layer: Layer, type_name: str, device: DeviceType, precision: str, kinds: str
) -> Iterator[tuple[Source, float]]:
    """What the roofline's times of a layer rest on, operation by operation."""
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


def _of_one(seconds: Mapping[Source, float]) -> Shares:
    """Shares of their sum; an operation of no length rests on nothing."""
    total = sum(seconds.values())
    if not total:
        return {"measured": 1.0}
    return {source: part / total for source, part in seconds.items()}
