"""A cluster's devices and links as arrays, for compiled code: the network that Programs run on.

Devices are numbered as in the cluster file; tensor-parallel groups are devices of their cluster. A
directed link is one direction of a link of the cluster, or both directions of a half-duplex one;
links that any number of messages may use at once are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster
from planner.costs.by_identity import by_identity

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Links = NDArray[np.int32]
Directed = tuple[int, int]
"""A link's number in the cluster and its direction: 1 from its first end, -1 to it, 0 both."""
NO_LINK = -1


@dataclass(frozen=True)
class NetworkTable:
    """What a cluster gives to computation and messages. D devices, K types, L directed links.

    The links from device d to e are ``first_link[d]``, ``middle_links`` of row ``middle[d, e]`` and
    ``last_link[e]``: clusters of many devices have few unlike rows in the middle.

    Attributes:
        devices: names of the devices.
        types: names of their types.
        type_of: D; number of each device's type.
        capacity_bytes: D; bytes that a plan may use.
        optimizer_gb_per_s: D; memory bandwidth of the optimizer's step, in 10^9 bytes/s.
        host_link_gb_per_s: D; bandwidth to the host's memory; 0: unknown.
        latency_s: D x D; seconds; infinite without a path, 0 from a device to itself.
        gb_per_s: D x D; bandwidth of the narrowest link on the way; 0 without a path, infinite from
            a device to itself.
        middle: D x D; row of ``middle_links``.
        middle_start: where each row begins in ``middle_links``, and the end of the last.
        middle_links: directed links.
        first_link, last_link: D; the directed links on which all that a device sends leaves it, and
            all that it receives reaches it; -1: the middle has them, or any number may use them.
        links: what each directed link is.
        link_gb_per_s: L; bandwidth.
        host_of: D; number of the host that slows a device; -1: none.
        slowdown: hosts x most devices of a host; factor by how many compute, from one.
        compute_slowdown: D; factor on computation while a device communicates.
        message_slowdown: D; factor on communication while it computes.
        gather_latency_s, gather_gb_per_s: D x 2; the ways in which a tensor-parallel group gathers
            a tensor, of which the faster counts; 0 and infinite of single devices.
        sum_latency_s, sum_gb_per_s: D x 2; the same of the all-reduce in a group.
        group_devices: D; devices of each group; 1 of single devices.
    """

    devices: tuple[str, ...]
    types: tuple[str, ...]
    type_of: Ints
    capacity_bytes: Ints
    optimizer_gb_per_s: Floats
    host_link_gb_per_s: Floats
    latency_s: Floats
    gb_per_s: Floats
    middle: Links
    middle_start: Links
    middle_links: Links
    first_link: Links
    last_link: Links
    links: tuple[Directed, ...]
    link_gb_per_s: Floats
    host_of: Ints
    slowdown: Floats
    compute_slowdown: Floats
    message_slowdown: Floats
    gather_latency_s: Floats
    gather_gb_per_s: Floats
    sum_latency_s: Floats
    sum_gb_per_s: Floats
    group_devices: Ints

    @staticmethod
    @by_identity
    def of(cluster: Cluster) -> NetworkTable:
        """Return the arrays of a cluster."""
        names = cluster.device_names
        types = tuple(cluster.device_types)
        kinds = [cluster.device_type(name) for name in names]
        routes = _Routes(cluster)
        gathers = [_collective(cluster, name, "all_gather") for name in names]
        sums = [_collective(cluster, name, "all_reduce") for name in names]
        host_of, slowdown = _hosts(cluster)
        return NetworkTable(
            devices=names,
            types=types,
            type_of=np.array([types.index(cluster.type_of(name)) for name in names]),
            capacity_bytes=np.array([kind.capacity_bytes for kind in kinds]),
            optimizer_gb_per_s=np.array([kind.optimizer_gb_per_s for kind in kinds]),
            host_link_gb_per_s=np.array([kind.host_link_gb_per_s or 0.0 for kind in kinds]),
            latency_s=routes.latency_s,
            gb_per_s=routes.gb_per_s,
            middle=routes.middle,
            middle_start=np.cumsum([0, *map(len, routes.rows)], dtype=np.int32),
            middle_links=np.array([*chain.from_iterable(routes.rows)], dtype=np.int32),
            first_link=routes.first,
            last_link=routes.last,
            links=tuple(routes.numbers),
            link_gb_per_s=np.array(
                [cluster.links[link].bandwidth_gb_per_s for link, _ in routes.numbers]
            ),
            host_of=host_of,
            slowdown=slowdown,
            compute_slowdown=_factors(cluster.slowed_by_communication, names),
            message_slowdown=_factors(cluster.slows_communication, names),
            gather_latency_s=np.array([row[0] for row in gathers]),
            gather_gb_per_s=np.array([row[1] for row in gathers]),
            sum_latency_s=np.array([row[0] for row in sums]),
            sum_gb_per_s=np.array([row[1] for row in sums]),
            group_devices=np.array([1 if k.group is None else k.group.devices for k in kinds]),
        )


class _Routes:
    """Routes between all devices: those of devices that are attached alike differ at their ends."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        names = cluster.device_names
        count = len(names)
        self.numbers: dict[Directed, int] = {}
        self.first = np.full(count, NO_LINK, dtype=np.int32)
        self.last = np.full(count, NO_LINK, dtype=np.int32)
        self.latency_s = np.full((count, count), np.inf)
        self.gb_per_s = np.zeros((count, count))
        self.middle = np.zeros((count, count), dtype=np.int32)
        self._row_of: dict[tuple[int, ...], int] = {(): 0}
        alike: dict[object, list[int]] = {}
        for number, name in enumerate(names):
            key = cluster.attachment(name)
            alike.setdefault(key, []).append(number)
            if key != name:
                self._number_port(number, name)
        for first in alike.values():
            for second in alike.values():
                self._fill(first, second)
        np.fill_diagonal(self.latency_s, 0.0)
        np.fill_diagonal(self.gb_per_s, np.inf)
        np.fill_diagonal(self.middle, 0)

    @property
    def rows(self) -> list[tuple[int, ...]]:
        return list(self._row_of)

    def _number(self, link: Directed) -> int:
        return self.numbers.setdefault(link, len(self.numbers))

    def _number_port(self, number: int, name: str) -> None:
        """Number the directions of the only link of a device."""
        index = self._port_of[name]
        link = self._cluster.links[index]
        if link.shared:
            return
        outwards = link.direction_from(name)
        self.first[number] = self._number((index, outwards))
        self.last[number] = self._number((index, -outwards))

    @cached_property
    def _port_of(self) -> dict[str, int]:
        """The link at each end; of several at one end, the last."""
        return {end: n for n, link in enumerate(self._cluster.links) for end in link.between}

    def _fill(self, first: Sequence[int], second: Sequence[int]) -> None:
        source, target = first[0], second[-1]
        if source == target:
            return
        names = self._cluster.device_names
        route = self._cluster.route(names[source], names[target])
        if route is None:
            return
        block = np.ix_(first, second)
        self.latency_s[block] = route.latency_s
        self.gb_per_s[block] = route.bandwidth_gb_per_s
        begin = 1 if self.first[source] != NO_LINK else 0
        end = len(route.links) - (1 if self.last[target] != NO_LINK else 0)
        links = tuple(self._number(link) for link in route.links[begin:end])
        self.middle[block] = self._row_of.setdefault(links, len(self._row_of))


def _hosts(cluster: Cluster) -> tuple[Ints, Floats]:
    """Return the number of each device's host, and how much each slows its devices."""
    slowing = [host for host in cluster.hosts if host.is_slowed]
    number = {name: index for index, host in enumerate(slowing) for name in host.devices}
    most = max((len(host.slowdown) for host in slowing), default=1)
    factors = np.ones((len(slowing), most))
    for row, host in zip(factors, slowing, strict=True):
        row[: len(host.slowdown)] = host.slowdown
    return np.array([number.get(name, -1) for name in cluster.device_names]), factors


def _factors(found: dict[str, float], names: Sequence[str]) -> Floats:
    return np.array([found.get(name, 1.0) for name in names])


def _collective(
    cluster: Cluster, device: str, kind: str
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of latency and the GB/s of the two ways of a collective in a group."""
    group = cluster.device_type(device).group
    if group is None:
        return (0.0, 0.0), (np.inf, np.inf)
    rows = next(ways for name, ways in group.collectives.items() if name == kind)
    one, other = rows[0], rows[-1]
    return (one.latency_us * 1e-6, other.latency_us * 1e-6), (one.gb_per_s, other.gb_per_s)
