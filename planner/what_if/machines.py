"""A problem on other machines: devices and links of other figures, and one device more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from planner.artifacts.cluster import Cluster, Link
from planner.artifacts.hardware import DeviceType, LinkType
from planner.artifacts.problem import Problem
from planner.costs.other_machines import with_twin, with_type
from planner.errors import PipeplanError, near
from planner.what_if.changes import DeviceChange, LinkChange

# --- devices --------------------------------------------------------------------------------------


def with_devices(problem: Problem, change: DeviceChange) -> Problem:
    """A problem with one device, or all of a type, of another size or speed.

    A device alone gets a type of its own, which the layers know as they know its old one.

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
        return with_type(problem, name, name, changed, speed=speed)
    if name not in cluster.numbers:
        raise PipeplanError(f"the cluster has no such device; {near(name, cluster.device_names)}")
    kind = cluster.type_of(name)
    changed = _changed_type(cluster.device_types[kind], change)
    alone = f"{kind} of {name}"
    return with_type(problem, kind, alone, changed, devices=(name,), speed=speed)


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


def with_another(problem: Problem, twin: str) -> Problem:
    """A problem with one device more, of the type and with the links of another.

    Raises:
        PipeplanError: if there is no such device.
    """
    cluster = problem.cluster
    if twin not in cluster.numbers:
        raise PipeplanError(f"the cluster has no such device; {near(twin, cluster.device_names)}")
    return replace(problem, cluster=with_twin(cluster, twin, _free_name(cluster, twin)))


def _free_name(cluster: Cluster, twin: str) -> str:
    """The next number behind the twin's, as ``n0/gpu4`` for ``n0/gpu1`` of four."""
    taken = {*cluster.device_names, *cluster.switches}
    match = re.fullmatch(r"(.*?)(\d+)", twin)
    stem, number = (match[1], int(match[2]) + 1) if match else (f"{twin}.", 2)
    while f"{stem}{number}" in taken:
        number += 1
    return f"{stem}{number}"


# --- links ----------------------------------------------------------------------------------------


def with_link(problem: Problem, change: LinkChange) -> Problem:
    """A problem with another bandwidth or latency between two neighbours.

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
    """Neighbours, each pair once."""
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
