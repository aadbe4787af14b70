"""A problem on other machines: devices of other figures, and one device more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from planner.artifacts.cluster import Cluster
from planner.artifacts.graph_record import Layer, MeasuredTimes
from planner.artifacts.hardware import DeviceType
from planner.artifacts.layer_graph import LayerGraph
from planner.artifacts.problem import Problem


def with_type(
    problem: Problem,
    old: str,
    new: str,
    kind: DeviceType,
    *,
    devices: Collection[str] = (),
    speed: float = 1.0,
) -> Problem:
    """A problem whose cluster has one device type more, or one of other figures.

    Args:
        problem: as it is.
        old: a type of its cluster.
        new: name of the other type, which the layers know as they know the old one; may be ``old``.
        kind: its figures.
        devices: those that become of the new type.
        speed: by which times that were measured on the old type are divided.
    """
    cluster = problem.cluster
    fields = {
        "device_types": {**cluster.device_types, new: kind},
        "devices": tuple(
            device.model_copy(update={"type": new}) if device.name in devices else device
            for device in cluster.devices
        ),
    }
    return replace(
        problem,
        cluster=cluster.model_copy(update=fields),
        graph=_with_layers(problem.graph, old, new, speed),
    )


def _with_layers(graph: LayerGraph, old: str, new: str, speed: float) -> LayerGraph:
    """What the layers say of a type, under its new name and with its new speed."""
    layers = tuple(_with_type_of(layer, old, new, speed) for layer in graph.record.layers)
    if layers == graph.record.layers:
        return graph
    return LayerGraph.from_record(graph.record.model_copy(update={"layers": layers}))


def _with_type_of(layer: Layer, old: str, new: str, speed: float) -> Layer:
    update: dict[str, Any] = {}
    if old in layer.measured:
        update["measured"] = {**layer.measured, new: _sooner(layer.measured[old], speed)}
    if old in layer.device_types and new not in layer.device_types:
        update["device_types"] = (*layer.device_types, new)
    return layer.model_copy(update=update) if update else layer


def _sooner(times: MeasuredTimes, speed: float) -> MeasuredTimes:
    fields = times.model_dump(exclude_none=True)
    return times.model_copy(update={name: seconds / speed for name, seconds in fields.items()})


def with_twin(cluster: Cluster, twin: str, name: str) -> Cluster:
    """A cluster with one device more, of the type, price and links of another.

    Args:
        cluster: as it is.
        twin: a device of it.
        name: of the new device; free.
    """
    (device,) = (device for device in cluster.devices if device.name == twin)
    copies = tuple(
        link.model_copy(update={"between": tuple(name if e == twin else e for e in link.between)})
        for link in cluster.links
        if twin in link.between
    )
    fields = {
        "devices": (*cluster.devices, device.model_copy(update={"name": name})),
        "links": (*cluster.links, *copies),
    }
    return cluster.model_copy(update=fields)
