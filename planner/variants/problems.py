"""Variants of a problem: other settings of the job, other devices, other figures of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from planner.cluster.hardware import DeviceType
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, Layer, WorkAtLength
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import LayerSplit
from planner.plan.problem import Problem
from planner.variants.clusters import without

_Timed = TypeVar("_Timed", Layer, LayerSplit, WorkAtLength)


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
    problem: Problem, old: str, new: str, kind: DeviceType, devices: Collection[str], speed: float
) -> Problem:
    """Return a problem with one device type more, which some devices become of.

    Args:
        problem: as it is.
        old: a type of its cluster.
        new: name of the other type, which layers allow and have times for as for the old one.
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
    record = _with_entries(problem.graph.record, old, new, speed)
    graph = LayerGraph.from_record(record)
    return replace(problem, cluster=cluster.model_copy(update=fields), graph=graph)


def _with_entries(record: GraphRecord, old: str, new: str, speed: float) -> GraphRecord:
    """Return a record with a type's entries under another name too, times divided by a speed."""

    def timed(row: _Timed) -> _Timed:
        if old not in row.measured:
            return row
        measured = {**row.measured, new: _sooner(row.measured[old], speed)}
        return row.model_copy(update={"measured": measured})

    def layer_on(layer: Layer) -> Layer:
        kinds, lengths = layer.device_types, tuple(map(timed, layer.lengths))
        if old in kinds and new not in kinds:
            kinds = (*kinds, new)
        return timed(layer).model_copy(update={"lengths": lengths, "device_types": kinds})

    splits = (
        split.model_copy(update={"layers": tuple(map(timed, split.layers))})
        for split in record.splits
    )
    update: dict[str, Any] = {
        "layers": tuple(map(layer_on, record.layers)),
        "splits": tuple(splits),
    }
    if old in record.on_types:
        of_types = {**record.on_types, new: record.on_types[old]}
        update["on_types"] = {
            name: _with_entries(row, old, new, speed) for name, row in of_types.items()
        }
    return record.model_copy(update=update)


def _sooner(times: MeasuredTimes, speed: float) -> MeasuredTimes:
    fields = times.model_dump(exclude_none=True)
    return times.model_copy(update={name: seconds / speed for name, seconds in fields.items()})
