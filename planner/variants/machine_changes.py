"""Changes of a plan's machines: devices lost, slowed and added, and the problem after them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from planner.cluster.cluster import Cluster, node_name
from planner.cluster.hardware import DeviceType
from planner.errors import PipeplanError, near, shorten
from planner.job import WITHOUT_GROUPS, Job
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.variants.clusters import with_copies, without
from planner.variants.group_changes import kept_groups, regrouped
from planner.variants.problems import with_device_type

MOST_FACTOR = 1e3


def parse_slow(texts: Iterable[str]) -> dict[str, float]:
    """Read factors of devices, each written ``DEVICE:FACTOR``, such as ``n0/gpu1:1.5``.

    Raises:
        PipeplanError: saying what is wrong with one, or naming a device that is named twice.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, colon, factor = text.rpartition(":")
        try:
            value = float(factor)
        except ValueError:
            value = math.nan
        if not colon or not name or math.isnan(value):
            raise PipeplanError(
                f"slow: {shorten(text)} is not DEVICE:FACTOR; write n0/gpu1:1.5 for a device that "
                "takes 1.5 times as long"
            )
        if name in found:
            raise PipeplanError(f"slow: {name!r} is named twice; name each device once")
        found[name] = value
    return found


def _require_factors(slow: Mapping[str, float]) -> None:
    for name, factor in slow.items():
        if not 1 < factor <= MOST_FACTOR:
            raise PipeplanError(
                f"slow: {shorten(f'{name}:{factor:g}')}: the factor is how many times as long "
                f"everything takes, above 1 and at most {MOST_FACTOR:g}; for a device that is as "
                "fast again as its type give the new cluster"
            )


def _twin(text: str) -> tuple[str, str]:
    """Return both names of ``NAME=LIKE``."""
    name, _, like = text.partition("=")
    if not name or not like:
        raise PipeplanError(
            f"{shorten(text)} is not NAME=LIKE; write n2=n0 for a node like n0, or "
            "n0/gpu4=n0/gpu3 for a device like n0/gpu3; for machines of another kind give all "
            "machines there are now as the new cluster"
        )
    return name, like


def is_within(vertex: str, name: str) -> bool:
    """Return whether a device or switch has a name, or lies in the node of that name."""
    return vertex == name or vertex.startswith(f"{name}/")


def devices_of(cluster: Cluster, name: str) -> tuple[str, ...]:
    """Return a device by its name, or all devices of a node by the node's.

    Raises:
        PipeplanError: naming what there is that is like it.
    """
    if name in cluster.numbers:
        return (name,)
    found = tuple(device for device in cluster.device_names if device.startswith(f"{name}/"))
    if not found:
        known = [*_nodes(cluster), *cluster.device_names]
        raise PipeplanError(f"the cluster has no device or node {name!r}; {near(name, known)}")
    return found


def named_devices(cluster: Cluster, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each device that some names stand for, with the name: its own or its node's.

    Raises:
        PipeplanError: naming one that there is not, or a device that two names stand for.
    """
    seen: dict[str, str] = {}
    for name in names:
        for device in devices_of(cluster, name):
            if device in seen:
                twice = (
                    f"{device!r} is named twice"
                    if seen[device] == name
                    else f"{seen[device]!r} and {name!r} both stand for {device!r}"
                )
                raise PipeplanError(f"{twice}; name each device once")
            seen[device] = name
            yield device, name


def _nodes(cluster: Cluster) -> Sequence[str]:
    return list(dict.fromkeys(filter(None, map(node_name, cluster.device_names))))


# --- the problem after changes --------------------------------------------------------------------


@dataclass(frozen=True)
class NewMachines:
    """A plan's problem on the machines that are left or came.

    The devices of a plan of tensor-parallel groups are its groups.

    Attributes:
        problem: the same model and job there.
        survivors: devices of the plan that are still there, with what they hold.
        slowed: devices that became slower.
        single: the same problem of single devices.
        parallel: the groups; None: single devices.
    """

    problem: Problem
    survivors: frozenset[str]
    slowed: frozenset[str]
    single: Problem
    parallel: TensorParallel | None = None


def new_machines(
    plan: Plan,
    *,
    cluster: Cluster | None = None,
    lost: Collection[str] = (),
    added: Sequence[str] = (),
    slow: Mapping[str, float] = MappingProxyType({}),
) -> NewMachines:
    """Return the problem of a plan after changes of its machines, made in the order given here.

    A tensor-parallel group stays if all its devices are left, and is as slow as the slowest of
    them; other devices form new groups of that size (:mod:`planner.variants.group_changes`).

    Args:
        plan: that training ran by.
        cluster: all machines there are now; None: those of the plan with what was lost and added.
        lost: devices, or nodes for all of their devices.
        added: ``NAME=LIKE`` each: a device or node ``NAME`` with the type and links of ``LIKE``,
            which is there or was before it was lost.
        slow: how many times as long everything takes on a device, or on each device of a node.

    Raises:
        PipeplanError: naming an unknown device, a clash of names or a wrong factor, or that nothing
            changed or is left.
    """
    if cluster is not None and (lost or added):
        raise PipeplanError(
            "cluster: it is all machines there are now, so lost and added have no place beside it; "
            "leave out the one or the others"
        )
    if cluster is None and not (lost or added or slow):
        raise PipeplanError(
            "nothing changed: name what was lost, slowed or added, or the new cluster"
        )
    _require_factors(slow)
    cluster = cluster or plan.cluster
    survivors = set(plan.cluster.device_names).intersection(cluster.device_names)
    with _about("lost"):
        gone = [device for device, _ in named_devices(cluster, lost)]
    cluster = _without(cluster, gone, lost)
    for text in added:
        with _about("added"):
            cluster = _with(cluster, *_twin(text), plan.cluster)
    left = frozenset(survivors.difference(gone))
    single = replace(plan.single_device_problem, cluster=cluster, job=_of_one_size(plan))
    if plan.tensor_parallel is None:
        single, slowed = _slowed(single, slow)
        return NewMachines(single, left, slowed, single)
    kept = kept_groups(plan.tensor_parallel.groups, left)
    single, slowed = _slowed(single, slow, [group.devices for group in kept])
    parallel = regrouped(plan.tensor_parallel, kept, single.cluster)
    return NewMachines(
        problem=grouped_problem(single, parallel),
        survivors=frozenset(group.name for group in kept),
        slowed=frozenset(g.name for g in parallel.groups if not slowed.isdisjoint(g.devices)),
        single=single,
        parallel=parallel,
    )


def _of_one_size(plan: Plan) -> Job:
    """Return the plan's job, with the size of its groups where the job allows any."""
    if plan.job.tensor_parallel != "any":
        return plan.job
    parallel = plan.tensor_parallel
    if parallel is None:
        return plan.job.model_copy(update=WITHOUT_GROUPS)
    fields = {"tensor_parallel": plan.degree, "sequence_parallel": parallel.sequence}
    return plan.job.model_copy(update=fields)


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Put the option's name before what is wrong with it."""
    try:
        yield
    except PipeplanError as error:
        raise PipeplanError(f"{field}: {problem}" for problem in error.problems) from None


def _without(cluster: Cluster, devices: Iterable[str], names: Iterable[str]) -> Cluster:
    """Return a cluster less some devices, and less the switches inside nodes that are gone."""
    nodes = set(names).difference(cluster.device_names)
    inner = (s for s in cluster.switches if any(is_within(s, node) for node in nodes))
    gone = {*devices, *inner}
    if gone.issuperset(cluster.device_names):
        raise PipeplanError(
            "lost: no device is left; give all machines there are now as the new cluster"
        )
    return without(cluster, gone)


def _with(cluster: Cluster, name: str, like: str, before: Cluster) -> Cluster:
    """Return a cluster with a device like another, or a node with its inner switch and links.

    What was lost may be the only one of its kind: its successor is like it was before.
    """
    taken = [own for own in (*cluster.device_names, *cluster.switches) if is_within(own, name)]
    if taken:
        raise PipeplanError(
            f"{name}={like}: the cluster has {taken[0]!r} already; choose another name"
        )
    is_lost = not _has(cluster, like) and _has(before, like)
    source = before if is_lost else cluster
    models = devices_of(source, like)
    if models != (like,) and name != like:
        _require_free_node(cluster, name, like, models[0])
    inside = [switch for switch in source.switches if is_within(switch, like)]
    names = {own: name + own[len(like) :] for own in (*models, *inside)}
    found = with_copies(cluster, names, source)
    # Read again, so that every rule of clusters is checked.
    return Cluster.parse(found.model_dump(mode="json"), "new cluster")


def _has(cluster: Cluster, name: str) -> bool:
    return any(is_within(device, name) for device in cluster.device_names)


def _require_free_node(cluster: Cluster, name: str, like: str, model: str) -> None:
    """Refuse a node whose name would put it among the devices of another."""
    node = node_name(name)
    if node is not None and node in _nodes(cluster):
        raise PipeplanError(
            f"{name}={like}: {like!r} is a node, and a node called {name!r} "
            f"would lie among the devices of {node!r}; write n9={like} for a node like it, or "
            f"{name}={model} for a device like one of its"
        )


# --- slower devices -------------------------------------------------------------------------------


def _slowed(
    problem: Problem, slow: Mapping[str, float], together: Iterable[Sequence[str]] = ()
) -> tuple[Problem, frozenset[str]]:
    """Make a device type for each type and factor, so that equally slow devices stay equal.

    Args:
        problem: of single devices.
        slow: factors of devices and nodes.
        together: devices that wait for each other, each as slow as the slowest of them.
    """
    with _about("slow"):
        named = named_devices(problem.cluster, slow)
        factor_of = {device: slow[name] for device, name in named}
    for devices in together:
        factor = max(factor_of.get(device, 1.0) for device in devices)
        if factor > 1:
            factor_of.update(dict.fromkeys(devices, factor))
    groups: dict[tuple[str, float], list[str]] = {}
    for device, factor in factor_of.items():
        groups.setdefault((problem.cluster.type_of(device), factor), []).append(device)
    for (kind, factor), devices in groups.items():
        types = problem.cluster.device_types
        figures = slower(types[kind], factor)
        name = f"{kind} slowed x{factor:g}"
        while name in types and types[name] != figures:
            name += "'"
        problem = with_device_type(problem, kind, name, figures, devices, 1 / factor)
    return problem, frozenset(factor_of)


def slower(kind: DeviceType, factor: float) -> DeviceType:
    """Return a device type on which every operation takes ``factor`` times as long."""
    data = kind.model_dump(mode="json")
    for figures in (data, *data.get("by_class", {}).values()):
        for name in ("ramp_up_us", "operation_overhead_us"):
            if figures.get(name) is not None:
                figures[name] *= factor
    data["peak_tflop_per_s"] = {name: x / factor for name, x in kind.peak_tflop_per_s.items()}
    for name in ("memory_bandwidth_gb_per_s", "host_link_gb_per_s", "loader_gb_per_s"):
        if data.get(name) is not None:
            data[name] /= factor
    return DeviceType.parse(data, "device_types")
