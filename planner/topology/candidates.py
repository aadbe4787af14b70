"""Candidate topologies for the measured latencies and bandwidths of all pairs of devices.

Devices are put into groups, by their hosts or by a drop of bandwidth between them. Inside a group
every device has a link to the group's switch. Groups are joined by links from switch to switch, or
every device has its own link to the network. The last resort is a link for every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from planner.cluster.cluster import Cluster
from planner.topology.measurements import BothWays, Ends, Measurements
from planner.units import MEASURED_DIGITS, significant

NETWORK = "network"
_STEPS = 2000
Group = tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """A cluster that may explain the measurements.

    Attributes:
        shape: description of the topology, for people.
        duplex: description of its half-duplex links, for people; empty if there are none.
        is_pairs: whether every pair has its own link.
        cluster: the cluster, with bandwidths and latencies.
        inner: indices of the links inside groups; the others join groups.
    """

    shape: str
    is_pairs: bool
    cluster: Cluster
    inner: frozenset[int]
    duplex: str = ""

    @property
    def title(self) -> str:
        """Shape and duplex."""
        return f"{self.shape}, {self.duplex}" if self.duplex else self.shape


@dataclass(frozen=True)
class _Link:
    between: Ends
    bandwidth_gb_per_s: float
    is_inner: bool = False


@dataclass(frozen=True)
class _Division:
    """Devices in groups; a group of several devices has a switch of its name."""

    by: str
    groups: Mapping[str, Group]

    @property
    def large(self) -> dict[str, Group]:
        """Groups of two devices or more."""
        return {name: group for name, group in self.groups.items() if len(group) > 1}

    def end(self, name: str) -> str:
        """Return the end of a group's links to others: its switch, or its only device."""
        return name if len(self.groups[name]) > 1 else self.groups[name][0]


def topologies(found: Measurements, tolerance: float, name: str) -> Iterator[Topology]:
    """Yield the candidates, the simplest first and a link for every pair last.

    Args:
        found: the measurements, of one pair at least.
        tolerance: bandwidths within this fraction of their median count as equal.
        name: name of the clusters.
    """
    apart = _pairs(found, name)
    for division in _divisions(found, apart.cluster):
        inside = list(_inside(found, division, tolerance))
        for title, outside in _joints(found, division, tolerance):
            links = [*inside, *outside]
            if links:
                yield _switched_topology(found, f"{title}, {division.by}", links, division, name)
    yield apart


def _divisions(found: Measurements, pairs: Cluster) -> Iterator[_Division]:
    hosts: dict[str, list[str]] = {}
    for member in found.members:
        hosts.setdefault(member.host, []).append(member.name)
    by_host = {name: tuple(group) for name, group in hosts.items()}
    yield _Division("grouped by host", by_host)
    groups = pairs.link_table.groups
    if groups is None or found.missing:
        return
    by_width: dict[int, list[str]] = {}
    for member, number in zip(found.members, groups, strict=True):
        by_width.setdefault(int(number), []).append(member.name)
    if sorted(map(tuple, by_width.values())) != sorted(by_host.values()):
        named = {f"group{n}": tuple(group) for n, group in enumerate(by_width.values())}
        yield _Division("grouped by bandwidth", named)


def _inside(found: Measurements, division: _Division, tolerance: float) -> Iterator[_Link]:
    for name, group in division.large.items():
        widths = _ports(found.pairs, group, tolerance)
        for device in group:
            if device in widths:
                yield _Link((device, name), widths[device], is_inner=True)


def _joints(
    found: Measurements, division: _Division, tolerance: float
) -> Iterator[tuple[str, list[_Link]]]:
    """Yield ways to join the groups, with a description of each."""
    names = list(division.groups)
    if len(names) == 1:
        yield "one switch", []
        return
    between = _between(found.pairs, division)
    if len(names) == 2:
        ends = (division.end(names[0]), division.end(names[1]))
        yield "a link between switches", [_Link(ends, width) for width in between.values()]
    else:
        uplinks = _narrowest(between, names, tolerance)
        star = [_Link((division.end(n), NETWORK), width) for n, width in uplinks.items()]
        yield "a link from each switch to a network", star
        mesh = [_Link((division.end(a), division.end(b)), w) for (a, b), w in between.items()]
        yield "links between all switches", mesh
    if division.large:
        devices = [device for group in division.groups.values() for device in group]
        group_of = {d: name for name, group in division.groups.items() for d in group}
        outer = {
            ends: row.bandwidth_gb_per_s
            for ends, row in found.pairs.items()
            if group_of[ends[0]] != group_of[ends[1]]
        }
        cards = _narrowest(outer, devices, tolerance)
        own = [_Link((device, NETWORK), width) for device, width in cards.items()]
        yield "a link from each device to a network", own


def _between(pairs: Mapping[Ends, BothWays], division: _Division) -> dict[Ends, float]:
    """Return the bandwidth between groups: the median over their devices."""
    found = {}
    for one, other in combinations(division.groups, 2):
        members = {*division.groups[one]}, {*division.groups[other]}
        widths = [
            row.bandwidth_gb_per_s
            for (a, b), row in pairs.items()
            if (a in members[0] and b in members[1]) or (b in members[0] and a in members[1])
        ]
        if widths:
            found[one, other] = median(widths)
    return found


def _ports(pairs: Mapping[Ends, BothWays], group: Group, tolerance: float) -> dict[str, float]:
    inside = {ends: row.bandwidth_gb_per_s for ends, row in pairs.items() if {*ends} <= {*group}}
    return _narrowest(inside, group, tolerance)


def _narrowest(
    widths: Mapping[Ends, float], ends: Iterable[str], tolerance: float
) -> dict[str, float]:
    """Return port bandwidths such that the narrower port sets the bandwidth of each pair.

    A port is as wide as the widest pair that it is part of. If all pairs are similar, all ports get
    their median.
    """
    if not widths:
        return {}
    middle = median(widths.values())
    alike = all(abs(width / middle - 1) <= tolerance for width in widths.values())
    most = {end: max((w for pair, w in widths.items() if end in pair), default=0) for end in ends}
    return {end: middle if alike else width for end, width in most.items() if width}


def _pairs(found: Measurements, name: str) -> Topology:
    links = [_Link(ends, row.bandwidth_gb_per_s) for ends, row in found.pairs.items()]
    latencies_s = [row.latency_s for row in found.pairs.values()]
    cluster = _cluster(found, links, latencies_s, (), name)
    host_of = {member.name: member.host for member in found.members}
    inner = (n for n, link in enumerate(links) if len({host_of[e] for e in link.between}) == 1)
    return Topology("a link for every pair", True, cluster, frozenset(inner))


def _switched_topology(
    found: Measurements, title: str, links: Sequence[_Link], division: _Division, name: str
) -> Topology:
    ends = {end for link in links for end in link.between}
    switches = [switch for switch in (*division.large, NETWORK) if switch in ends]
    cluster = _cluster(found, links, [0.0] * len(links), switches, name)
    latencies_s = _latencies_s(cluster, found.pairs)
    cluster = _cluster(found, links, latencies_s, switches, name)
    inner = frozenset(n for n, link in enumerate(links) if link.is_inner)
    return Topology(title, False, cluster, inner)


def cluster_without_links(found: Measurements, name: str) -> Cluster:
    """Return the measured devices alone, as where there is only one."""
    return _cluster(found, (), (), (), name)


def _cluster(
    found: Measurements,
    links: Sequence[_Link],
    latencies_s: Sequence[float],
    switches: Sequence[str],
    name: str,
) -> Cluster:
    link_rows = [
        {
            "between": list(link.between),
            "bandwidth_gb_per_s": significant(link.bandwidth_gb_per_s, MEASURED_DIGITS),
            "latency_us": significant(latency_s * 1e6, MEASURED_DIGITS),
            "source": "measured",
        }
        for link, latency_s in zip(links, latencies_s, strict=True)
    ]
    data: dict[str, Any] = {
        "format": "pipeplan-cluster/1",
        "name": name,
        "device_types": {kind: row.model_dump() for kind, row in found.types.items()},
        "devices": [{"name": member.name, "type": member.type} for member in found.members],
        "switches": list(switches),
        "links": link_rows,
        "hosts": [host.model_dump(mode="json") for host in found.hosts.values()],
    }
    return Cluster.parse(data, "measured cluster")


def _latencies_s(cluster: Cluster, pairs: Mapping[Ends, BothWays]) -> list[float]:
    """Return non-negative latencies of links whose sums fit those of pairs best, by least squares.

    Projected gradient descent starts from an even part of each route, so that links with the same
    use get the same latency.
    """
    rows = []
    wanted = []
    for ends, row in pairs.items():
        route = cluster.route(*ends)
        if route is not None:
            rows.append([index for index, _ in route.links])
            wanted.append(row.latency_s)
    matrix = np.zeros((len(rows), len(cluster.links)))
    for number, used in enumerate(rows):
        matrix[number, used] = 1.0
    target = np.array(wanted)
    latencies = np.full(matrix.shape[1], target.mean() / matrix.sum(axis=1).mean())
    step = 1 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(_STEPS):
        latencies = np.maximum(0.0, latencies - step * matrix.T @ (matrix @ latencies - target))
    return [float(value) for value in latencies]


def with_links(cluster: Cluster, change: Callable[[int], Mapping[str, Any]]) -> Cluster:
    """Return the cluster with fields of some links changed, by their indices."""
    links = tuple(link.model_copy(update=change(index)) for index, link in enumerate(cluster.links))
    return cluster.model_copy(update={"links": links})
