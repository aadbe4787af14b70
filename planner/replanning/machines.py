"""The problem of a plan on the machines that are left, and those that came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner.artifacts.cluster import Cluster
from planner.artifacts.hardware import DeviceType
from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.costs.other_machines import with_twin, with_type
from planner.errors import PipeplanError
from planner.replanning.addition import with_file
from planner.replanning.changes import (
    MachineChanges,
    Slow,
    Twin,
    devices_of,
    is_within,
    named_devices,
)


@dataclass(frozen=True)
class NewMachines:
    """A plan's problem on other machines.

    Attributes:
        problem: the same model and job there.
        survivors: devices of the plan that are still there, with what they hold.
        slowed: devices that became slower.
    """

    problem: Problem
    survivors: frozenset[str]
    slowed: frozenset[str]


def new_machines(plan: Plan, changes: MachineChanges) -> NewMachines:
    """The problem that a plan would answer after some changes.

    Raises:
        PipeplanError: naming an unknown device, a clash of names, or that nothing is left.
    """
    cluster = changes.cluster or plan.cluster
    survivors = set(plan.cluster.device_names).intersection(cluster.device_names)
    with _about("lost"):
        lost = [device for device, _ in named_devices(cluster, changes.lost)]
    cluster = _without(cluster, lost, changes.lost)
    for addition in changes.added:
        with _about("added"):
            cluster = _with(cluster, addition, plan.cluster)
    problem, slowed = _slowed(replace(plan.problem, cluster=cluster), changes.slow)
    return NewMachines(problem, frozenset(survivors.difference(lost)), slowed)


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Put the option's name before what is wrong with it."""
    try:
        yield
    except PipeplanError as error:
        raise PipeplanError(f"{field}: {problem}" for problem in error.problems) from None


def _with(cluster: Cluster, addition: Path | Twin, before: Cluster) -> Cluster:
    if not isinstance(addition, Twin):
        return with_file(cluster, addition)
    if _has(cluster, addition.like) or not _has(before, addition.like):
        return _with_twins(cluster, addition)
    # What was lost may be the only one of its kind: its successor is like it.
    restored = _restored(cluster, addition.like, before)
    if addition.name == addition.like:
        return restored
    lost = devices_of(restored, addition.like)
    return _without(_with_twins(restored, addition), lost, [addition.like])


def _has(cluster: Cluster, name: str) -> bool:
    return any(is_within(device, name) for device in cluster.device_names)


def _restored(cluster: Cluster, name: str, before: Cluster) -> Cluster:
    """A lost device or node again, with its links to what is still there."""
    devices = set(devices_of(before, name))
    inner = {switch for switch in before.switches if is_within(switch, name)}
    back = {*devices, *inner}
    there = {*cluster.device_names, *cluster.switches, *back}
    links = (
        link
        for link in before.links
        if not back.isdisjoint(link.between) and there.issuperset(link.between)
    )
    fields = {
        "devices": (*cluster.devices, *(d for d in before.devices if d.name in devices)),
        "switches": (*cluster.switches, *(s for s in before.switches if s in inner)),
        "links": (*cluster.links, *links),
    }
    return Cluster.parse(cluster.model_copy(update=fields).model_dump(mode="json"), "new cluster")


def _without(cluster: Cluster, devices: Iterable[str], names: Iterable[str]) -> Cluster:
    """A cluster less some devices, and less the switches inside nodes that are gone."""
    nodes = set(names).difference(cluster.device_names)
    inner = (s for s in cluster.switches if any(is_within(s, node) for node in nodes))
    gone = {*devices, *inner}
    if not gone:
        return cluster
    left = tuple(device for device in cluster.devices if device.name not in gone)
    if not left:
        raise PipeplanError(
            "lost: no device is left; give all machines there are now as the new cluster"
        )
    fields = {
        "devices": left,
        "switches": tuple(name for name in cluster.switches if name not in gone),
        "links": tuple(link for link in cluster.links if not gone.intersection(link.between)),
    }
    return cluster.model_copy(update=fields)


def _with_twins(cluster: Cluster, twin: Twin) -> Cluster:
    """A device like another, or a node like another with its inner switch and links."""
    taken = [
        name for name in (*cluster.device_names, *cluster.switches) if is_within(name, twin.name)
    ]
    if taken:
        raise PipeplanError(
            f"{twin.name}={twin.like}: the cluster has {taken[0]!r} already; choose another name"
        )
    models = devices_of(cluster, twin.like)
    if models == (twin.like,):
        return Cluster.parse(
            with_twin(cluster, twin.like, twin.name).model_dump(mode="json"), "new cluster"
        )
    node = twin.name.rpartition("/")[0]
    if any(device.rpartition("/")[0] == node for device in cluster.device_names if node):
        raise PipeplanError(
            f"{twin.name}={twin.like}: {twin.like!r} is a node, and a node called {twin.name!r} "
            f"would lie among the devices of {node!r}; write n9={twin.like} for a node like it, or "
            f"{twin.name}={models[0]} for a device like one of its"
        )
    return _with_node(cluster, twin, models)


def _with_node(cluster: Cluster, twin: Twin, models: tuple[str, ...]) -> Cluster:
    """Everything called LIKE or LIKE/… once more, with its links; those to others lead to them."""
    inside = [switch for switch in cluster.switches if is_within(switch, twin.like)]
    image = {name: twin.name + name[len(twin.like) :] for name in (*models, *inside)}
    copies = tuple(
        link.model_copy(update={"between": tuple(image.get(end, end) for end in link.between)})
        for link in cluster.links
        if not image.keys().isdisjoint(link.between)
    )
    devices = tuple(
        device.model_copy(update={"name": image[device.name]})
        for device in cluster.devices
        if device.name in image
    )
    fields = {
        "devices": (*cluster.devices, *devices),
        "switches": (*cluster.switches, *(image[name] for name in inside)),
        "links": (*cluster.links, *copies),
    }
    copied = cluster.model_copy(update=fields)
    return Cluster.parse(copied.model_dump(mode="json"), "new cluster")


# --- slower devices -------------------------------------------------------------------------------


def _slowed(problem: Problem, slow: Sequence[Slow]) -> tuple[Problem, frozenset[str]]:
    """Each device type once for each factor: devices that are slow alike stay interchangeable."""
    with _about("slow"):
        factors = {row.name: row.factor for row in slow}
        named = dict(named_devices(problem.cluster, [row.name for row in slow]))
    groups: dict[tuple[str, float], list[str]] = {}
    for device, name in named.items():
        groups.setdefault((problem.cluster.type_of(device), factors[name]), []).append(device)
    for (kind, factor), devices in groups.items():
        types = problem.cluster.device_types
        figures = slower(types[kind], factor)
        name = f"{kind} slowed x{factor:g}"
        while name in types and types[name] != figures:
            name += "'"
        problem = with_type(problem, kind, name, figures, devices=devices, speed=1 / factor)
    return problem, frozenset(named)


def slower(kind: DeviceType, factor: float) -> DeviceType:
    """A device type on which every operation takes ``factor`` times as long, whatever bounds it."""
    data = kind.model_dump(mode="json")
    for figures in (data, *data.get("by_class", {}).values()):
        for name in ("ramp_up_us", "operation_overhead_us"):
            if figures.get(name) is not None:
                figures[name] *= factor
    data["peak_tflop_per_s"] = {name: x / factor for name, x in kind.peak_tflop_per_s.items()}
    data["memory_bandwidth_gb_per_s"] = kind.memory_bandwidth_gb_per_s / factor
    return DeviceType.parse(data, "device_types")
