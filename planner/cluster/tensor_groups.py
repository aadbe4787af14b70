"""Tensor-parallel groups as devices: a cluster whose devices are groups of another's.

The devices of a group run every layer together, each a part of it. To everything outside, the group
is one device with the throughput, the memory and the links of all: a message to another group is
sent in parts along all of them. What is inside, collectives over parts of layers, becomes figures
of its device type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Annotated

from pydantic import Field

from planner.cluster.cluster import Cluster, Device, Link
from planner.cluster.cluster_file import Host, Name
from planner.cluster.collective_algorithms import Algorithm, all_reduce_algorithms
from planner.cluster.hardware import (
    ClassEfficiency,
    CollectiveFigures,
    DeviceType,
    GroupFigures,
)
from planner.cluster.routing import Route
from planner.errors import PipeplanError
from planner.model.figures import CollectiveKind
from planner.records.document import Record


class TensorGroup(Record):
    """Devices that run every layer of their stage together.

    Attributes:
        name: Name of the group, by which stages and orders call it.
        devices: Its devices, of one type; collectives run around them in this order. One alone runs
            whole layers.
    """

    name: Name
    devices: Annotated[tuple[Name, ...], Field(min_length=1)]


def grouped(cluster: Cluster, groups: Sequence[TensorGroup]) -> Cluster:
    """Return a cluster with each group as one device; devices in no group are left out.

    Times inside a group are those while all groups communicate, so that what they share is shared.
    Links of a group's devices to the same other end become one link of their total bandwidth.

    Args:
        cluster: of single devices.
        groups: disjoint; those in one host that slows its devices have equally many devices.

    Raises:
        PipeplanError: naming every group that cannot be one.
    """
    problems = [*_problems(cluster, groups)]
    if problems:
        raise PipeplanError(problems)
    inside = _Inside(cluster, groups)
    alone = [cluster.type_of(group.devices[0]) for group in groups if len(group.devices) == 1]
    types = {name: cluster.device_types[name] for name in alone}
    devices = []
    for group in groups:
        name = _named(types, cluster.type_of(group.devices[0]), inside.type_of(group))
        devices.append(Device(name=group.name, type=name, price_per_hour=_price(cluster, group)))
    return Cluster(
        name=cluster.name,
        currency=cluster.currency,
        device_types=types,
        devices=tuple(devices),
        switches=cluster.switches,
        links=tuple(_links(cluster, groups)),
        hosts=tuple(_hosts(cluster, groups)),
    )


def _problems(cluster: Cluster, groups: Sequence[TensorGroup]) -> Iterator[str]:
    uses = Counter(name for group in groups for name in group.devices)
    for index, group in enumerate(groups):
        unknown = [name for name in group.devices if name not in cluster.numbers]
        for name in unknown:
            yield f"groups[{index}].devices: the cluster has no device {name!r}; correct the name"
        for name in group.devices:
            if uses[name] > 1:
                yield f"groups[{index}].devices: {name!r} is named twice; keep it in one group"
        if not unknown:
            yield from _unlike(cluster, index, group)
    for host in cluster.hosts:
        held = [group for group in groups if set(group.devices) & set(host.devices)]
        if len({len(group.devices) for group in held}) > 1:
            yield (
                f"groups: {', '.join(group.name for group in held)} have several numbers of "
                "devices in one host, where devices slow each other by how many compute at once; "
                "give them equally many"
            )


def _unlike(cluster: Cluster, index: int, group: TensorGroup) -> Iterator[str]:
    types = sorted({cluster.type_of(name) for name in group.devices})
    if len(types) > 1:
        yield (
            f"groups[{index}].devices: {group.name!r} has devices of types {', '.join(types)}; the "
            "parts of a layer are equal, so give it devices of one type"
        )
    if len({cluster.host_of.get(name) for name in group.devices}) > 1:
        yield (
            f"groups[{index}].devices: {group.name!r} has devices of several hosts that slow their "
            "devices; keep it in one host"
        )
    for pair in permutations(group.devices, 2):
        if cluster.route(*pair) is None:
            yield (
                f"groups[{index}].devices: no path leads from {pair[0]!r} to {pair[1]!r}; join "
                "them by a link, or group other devices"
            )
            return


# --- the inside -----------------------------------------------------------------------------------


def _algorithms(devices: Sequence[str]) -> Mapping[CollectiveKind, tuple[Algorithm, ...]]:
    """Return the algorithms of every collective, with the share of the tensor an edge carries.

    Half of the all-reduce's ring gathers or scatters a tensor, whose whole size is on one side; in
    an all-to-all all pairs send at once.
    """
    count = len(devices)
    ring, tree = all_reduce_algorithms(devices, 1)
    half = (ring._replace(steps=count - 1),)
    return {
        "all_reduce": (ring, tree),
        "all_gather": half,
        "reduce_scatter": half,
        "all_to_all": (Algorithm(1, 1 / count, [*permutations(devices, 2)]),),
    }


class _Inside:
    """Device types of groups, whose collectives share links with those of all other groups."""

    def __init__(self, cluster: Cluster, groups: Sequence[TensorGroup]) -> None:
        self._cluster = cluster
        self._plans = {
            group.name: _algorithms(group.devices) for group in groups if len(group.devices) > 1
        }
        self._sharing: dict[tuple[CollectiveKind, int], Counter[tuple[int, int]]] = {}
        for rows in self._plans.values():
            for collective, algorithms in rows.items():
                for number, algorithm in enumerate(algorithms):
                    found = self._sharing.setdefault((collective, number), Counter())
                    found.update(x for edge in algorithm.edges for x in self._route(edge).links)

    def _route(self, edge: tuple[str, str]) -> Route:
        route = self._cluster.route(*edge)
        assert route is not None  # Refused before.
        return route

    def type_of(self, group: TensorGroup) -> DeviceType:
        """Return the figures of a group as a device."""
        one = self._cluster.device_type(group.devices[0])
        count = len(group.devices)
        if count == 1:
            return one
        host = self._cluster.host_of.get(group.devices[0])
        collectives = {
            collective: tuple(
                self._figures(algorithm, self._sharing[collective, number])
                for number, algorithm in enumerate(algorithms)
            )
            for collective, algorithms in self._plans[group.name].items()
        }
        return slowed(one, 1.0 if host is None else host.slowdown[count - 1]).model_copy(
            update={
                "memory_gib": one.memory_gib * count,
                "reserved_gib": one.reserved_gib * count,
                "memory_bandwidth_gb_per_s": one.memory_bandwidth_gb_per_s * count,
                "peak_tflop_per_s": {name: x * count for name, x in one.peak_tflop_per_s.items()},
                "price_per_hour": None,
                "group": GroupFigures(devices=count, collectives=collectives),
            }
        )

    def _figures(
        self, algorithm: Algorithm, sharing: Mapping[tuple[int, int], int]
    ) -> CollectiveFigures:
        routes = [self._route(edge) for edge in algorithm.edges]
        links = self._cluster.links
        width = min(
            min(
                (links[link[0]].bandwidth_gb_per_s / sharing[link] for link in route.links),
                default=route.bandwidth_gb_per_s,
            )
            for route in routes
        )
        width = min(width, *(route.bandwidth_gb_per_s for route in routes))
        latency_s = max(route.latency_s for route in routes)
        return CollectiveFigures(
            latency_us=algorithm.steps * latency_s * 1e6,
            gb_per_s=width / (algorithm.steps * algorithm.bytes_),
        )


def slowed(kind: DeviceType, factor: float) -> DeviceType:
    """Return a device type that takes ``factor`` times as long for every operation."""
    if factor == 1:
        return kind
    by_class = {
        name: ClassEfficiency(
            efficiency=None if row.efficiency is None else row.efficiency / factor,
            bandwidth_efficiency=(
                None if row.bandwidth_efficiency is None else row.bandwidth_efficiency / factor
            ),
            ramp_up_us=None if row.ramp_up_us is None else row.ramp_up_us * factor,
        )
        for name, row in kind.by_class.items()
    }
    return kind.model_copy(
        update={
            "efficiency": kind.efficiency / factor,
            "bandwidth_efficiency": kind.bandwidth_efficiency / factor,
            "ramp_up_us": kind.ramp_up_us * factor,
            "operation_overhead_us": kind.operation_overhead_us * factor,
            "by_class": by_class,
        }
    )


def _named(types: dict[str, DeviceType], one: str, kind: DeviceType) -> str:
    """Return a name for a group's type, the same for equal figures."""
    if kind.group is None:
        return one
    name, number = f"{one}x{kind.group.devices}", 1
    while types.setdefault(name, kind) != kind:
        number += 1
        name = f"{one}x{kind.group.devices}-{number}"
    return name


def _price(cluster: Cluster, group: TensorGroup) -> float | None:
    prices = [cluster.prices_per_hour[name] for name in group.devices]
    return None if None in prices else sum(price for price in prices if price is not None)


# --- the outside ----------------------------------------------------------------------------------


def _links(cluster: Cluster, groups: Sequence[TensorGroup]) -> Iterator[Link]:
    """Yield the links between groups and switches.

    Links of a group to one other end are one: it has their bandwidths together, since a message is
    sent in parts along all of them, and the longest of their latencies.
    """
    ends = _ends(cluster, groups)
    for bundle in link_bundles(cluster, groups):
        links = [cluster.links[index] for index in bundle]
        yield _bundled(
            [
                link.model_copy(update={"between": tuple(ends[end] for end in link.between)})
                for link in links
            ]
        )


def _ends(cluster: Cluster, groups: Sequence[TensorGroup]) -> dict[str, str]:
    """Return what the ends of links are called on the cluster of groups."""
    ends = {name: name for name in cluster.switches}
    ends.update((name, group.name) for group in groups for name in group.devices)
    return ends


def link_bundles(cluster: Cluster, groups: Sequence[TensorGroup]) -> list[tuple[int, ...]]:
    """Return the links, by index, that each link of the cluster of groups stands for, in its order.

    Links inside a group, and those of devices in no group, are in none.

    Args:
        cluster: of single devices.
        groups: see :func:`grouped`.
    """
    ends, single = _ends(cluster, groups), set(cluster.switches)
    bundles: dict[object, list[int]] = {}
    for index, link in enumerate(cluster.links):
        if not all(end in ends for end in link.between):
            continue
        first, second = (ends[end] for end in link.between)
        if first != second:
            # Links between two switches stay what they are.
            key = index if {first, second} <= single else frozenset((first, second))
            bundles.setdefault(key, []).append(index)
    return [tuple(bundle) for bundle in bundles.values()]


def _bundled(links: Sequence[Link]) -> Link:
    if len(links) == 1:
        return links[0]
    return links[0].model_copy(
        update={
            "bandwidth_gb_per_s": sum(link.bandwidth_gb_per_s for link in links),
            "latency_us": max(link.latency_us for link in links),
            "duplex": "half" if any(link.duplex == "half" for link in links) else "full",
            "shared": all(link.shared for link in links),
        }
    )


def _hosts(cluster: Cluster, groups: Sequence[TensorGroup]) -> Iterator[Host]:
    """Yield hosts that slow groups further than a single one of them is slowed."""
    for host in cluster.hosts:
        held = [group for group in groups if group.devices[0] in host.devices]
        if not held:
            continue
        size = len(held[0].devices)
        alone = host.slowdown[size - 1]
        factors = (host.slowdown[number * size - 1] / alone for number in range(1, len(held) + 1))
        yield Host(devices=tuple(group.name for group in held), slowdown=tuple(factors))
