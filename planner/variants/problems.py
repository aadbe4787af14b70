"""Variants of a problem: other settings of the job, other devices, other figures of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from planner.cluster.hardware import DeviceType
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, Layer
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import SplitRecord
from planner.plan.problem import Problem
from planner.variants.clusters import without


def with_job(problem: Problem, **settings: Any) -> Problem:
    """Return a problem with other settings of its job that cost the layers nothing."""
    return replace(problem, job=problem.job.model_copy(update=settings))


def restricted_to(problem: Problem, devices: Collection[str]) -> Problem:
    """Return a problem with some of its devices only.

    Devices forward nothing, so the routes among those kept are as they were.

    Raises:
        PipeplanError: if some layer can run on none of them.
    """
    gone = set(problem.cluster.device_names).difference(devices)
    return replace(problem, cluster=without(problem.cluster, gone))


def with_memory(problem: Problem, memory_gib: Mapping[str, float]) -> Problem:
    """Return a problem whose device types have other sizes of memory, given by type."""
    kinds = problem.cluster.device_types
    changed = {
        name: kinds[name].model_copy(update={"memory_gib": size})
        for name, size in memory_gib.items()
    }
    cluster = problem.cluster.model_copy(update={"device_types": {**kinds, **changed}})
    return replace(problem, cluster=cluster)


# --- device types ---------------------------------------------------------------------------------


def with_device_type(
    problem: Problem,
    old: str,
    new: str,
    kind: DeviceType,
    *,
    devices: Collection[str] = (),
    speed: float = 1.0,
) -> Problem:
    """Return a problem whose cluster has one device type more, or one of other figures.

    Args:
        problem: as it is.
        old: a type of its cluster.
        new: name of the other type, which layers allow and have times for as for the old one; may
            be ``old``.
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
    """Return the graph with a type's entries under its new name, times divided by its speed."""
    record = _with_entries(graph.record, old, new, speed)
    return graph if record is graph.record else LayerGraph.from_record(record)


def _with_entries(record: GraphRecord, old: str, new: str, speed: float) -> GraphRecord:
    update: dict[str, Any] = {}
    layers = tuple(_with_type_of(layer, old, new, speed) for layer in record.layers)
    if layers != record.layers:
        update["layers"] = layers
    splits = tuple(_with_type_of_split(split, old, new, speed) for split in record.splits)
    if splits != record.splits:
        update["splits"] = splits
    if old in record.on_types:
        of_types = {**record.on_types, new: record.on_types[old]}
        update["on_types"] = {
            name: _with_entries(row, old, new, speed) for name, row in of_types.items()
        }
    return record.model_copy(update=update) if update else record


def _with_type_of_split(split: SplitRecord, old: str, new: str, speed: float) -> SplitRecord:
    layers = tuple(
        row.model_copy(update={"measured": _with_new(row.measured, old, new, speed)})
        for row in split.layers
    )
    return split if layers == split.layers else split.model_copy(update={"layers": layers})


def _with_new(
    measured: Mapping[str, MeasuredTimes], old: str, new: str, speed: float
) -> Mapping[str, MeasuredTimes]:
    return {**measured, new: _sooner(measured[old], speed)} if old in measured else measured


def _with_type_of(layer: Layer, old: str, new: str, speed: float) -> Layer:
    update: dict[str, Any] = {}
    if old in layer.measured:
        update["measured"] = _with_new(layer.measured, old, new, speed)
        update["lengths"] = tuple(
            row.model_copy(update={"measured": _with_new(row.measured, old, new, speed)})
            for row in layer.lengths
        )
    if old in layer.device_types and new not in layer.device_types:
        update["device_types"] = (*layer.device_types, new)
    return layer.model_copy(update=update) if update else layer


def _sooner(times: MeasuredTimes, speed: float) -> MeasuredTimes:
    fields = times.model_dump(exclude_none=True)
    return times.model_copy(update={name: seconds / speed for name, seconds in fields.items()})
