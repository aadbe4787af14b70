"""Variants of a problem: other settings of the job, other devices, other figures of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.cluster.cluster import Cluster, Link
from planner.cluster.hardware import DeviceType, LinkType
from planner.errors import PipeplanError, near
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord, Layer
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import SplitRecord
from planner.plan.problem import Problem
from planner.variants.changes import DeviceChange, LinkChange
from planner.variants.clusters import with_copies, without


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


def with_device_figures(problem: Problem, change: DeviceChange) -> Problem:
    """Return a problem with one device, or all of a type, of another size or speed.

    A device alone gets a type of its own, with its old type's entries in the layers.

    Raises:
        PipeplanError: if there is no such device or type, or no device can be like that.
    """
    cluster, name = problem.cluster, change.name
    speed = change.factor if change.figure == "speed" else 1.0
    if change.target == "type":
        used = dict.fromkeys(device.type for device in cluster.devices)
        if name not in used:
            raise PipeplanError(f"the cluster has no device of this type; {near(name, used)}")
        changed = _changed_type(cluster.device_types[name], change)
        return with_device_type(problem, name, name, changed, speed=speed)
    if name not in cluster.numbers:
        raise PipeplanError(f"the cluster has no such device; {near(name, cluster.device_names)}")
    kind = cluster.type_of(name)
    changed = _changed_type(cluster.device_types[kind], change)
    alone = f"{kind} of {name}"
    return with_device_type(problem, kind, alone, changed, devices=(name,), speed=speed)


def _changed_type(kind: DeviceType, change: DeviceChange) -> DeviceType:
    factor = change.factor
    if change.figure == "memory":
        data = {**kind.model_dump(), "memory_gib": kind.memory_gib * factor}
    else:
        peaks = {name: peak * factor for name, peak in kind.peak_tflop_per_s.items()}
        width = kind.memory_bandwidth_gb_per_s * factor
        data = {
            **kind.model_dump(),
            "peak_tflop_per_s": peaks,
            "memory_bandwidth_gb_per_s": width,
        }
    return DeviceType.parse(data, "device_types")


def with_device_added(problem: Problem, twin: str) -> Problem:
    """Return a problem with one device more, of the type and with the links of another.

    Raises:
        PipeplanError: if there is no such device.
    """
    cluster = problem.cluster
    if twin not in cluster.numbers:
        raise PipeplanError(f"the cluster has no such device; {near(twin, cluster.device_names)}")
    return replace(problem, cluster=with_copies(cluster, {twin: _free_name(cluster, twin)}))


def _free_name(cluster: Cluster, twin: str) -> str:
    """Return the next number after the twin's, as ``n0/gpu4`` for ``n0/gpu1`` of four."""
    taken = {*cluster.device_names, *cluster.switches}
    match = re.fullmatch(r"(.*?)(\d+)", twin)
    stem, number = (match[1], int(match[2]) + 1) if match else (f"{twin}.", 2)
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"


# --- links ----------------------------------------------------------------------------------------


def with_link(problem: Problem, change: LinkChange) -> Problem:
    """Return a problem with another bandwidth or latency between two neighbours.

    Raises:
        PipeplanError: if they are none, or no link can be like that.
    """
    cluster = problem.cluster
    chosen = {ends for ends in _pairs(cluster) if change.name in _names(ends)}
    if not chosen:
        known = ["-".join(ends) for ends in _pairs(cluster)]
        raise PipeplanError(f"the cluster has no such link; {near(change.name, known)}")
    if len(chosen) > 1:
        exact = " or ".join(sorted(">".join(ends) for ends in chosen))
        raise PipeplanError(f"it may be several links; write {exact}")
    ends = set(chosen.pop())
    kinds = {_kind(link) for link in cluster.links if set(link.between) == ends}
    links = tuple(
        _changed_link(link, change)
        if set(link.between) == ends or (change.alike and _kind(link) in kinds)
        else link
        for link in cluster.links
    )
    return replace(problem, cluster=cluster.model_copy(update={"links": links}))


def _pairs(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the neighbours, each pair once."""
    seen: set[frozenset[str]] = set()
    for link in cluster.links:
        if frozenset(link.between) not in seen:
            seen.add(frozenset(link.between))
            yield link.between


def _names(ends: tuple[str, str]) -> set[str]:
    first, second = ends
    return {f"{u}{sign}{v}" for u, v in ((first, second), (second, first)) for sign in "->"}


def _kind(link: Link) -> tuple[float, float, str, bool]:
    return link.bandwidth_gb_per_s, link.latency_us, link.duplex, link.shared


def _changed_link(link: Link, change: LinkChange) -> Link:
    field = "bandwidth_gb_per_s" if change.figure == "bandwidth" else "latency_us"
    value = getattr(link, field) * change.factor
    checked = {name: getattr(link, name) for name in LinkType.model_fields} | {field: value}
    LinkType.parse(checked, "links")
    return link.model_copy(update={field: value})
