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
from typing import Any, NamedTuple

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cluster.merge import NETWORK
from planner.topology.measurements import Ends, Measurements
from planner.units import MEASURED_DIGITS, significant

PAIRS = "a link for every pair"
_STEPS = 2000
Groups = Mapping[str, tuple[str, ...]]
"""Devices by the name of their group, which is that of its switch if it has several devices."""
Joint = tuple[str, list["_Link"]]
"""Links between groups, and a description of them."""


@dataclass(frozen=True)
class Topology:
    """A cluster that may explain the measurements.

    Attributes:
        shape: description of the topology, for people.
        cluster: the cluster, with bandwidths and latencies.
        inner: indices of the links inside groups; the others join groups.
        duplex: description of its half-duplex links, for people; empty if there are none.
    """

    shape: str
    cluster: Cluster
    inner: frozenset[int]
    duplex: str = ""

    @property
    def is_pairs(self) -> bool:
        """Whether every pair has its own link."""
        return self.shape == PAIRS

    @property
    def title(self) -> str:
        """Shape and duplex."""
        return f"{self.shape}, {self.duplex}" if self.duplex else self.shape


class _Link(NamedTuple):
    between: Ends
    bandwidth_gb_per_s: float


def topologies(found: Measurements, tolerance: float, name: str) -> Iterator[Topology]:
    """Yield the candidates, the simplest first and a link for every pair last.

    Args:
        found: the measurements, of one pair at least.
        tolerance: bandwidths within this fraction of their median count as equal.
        name: name of the clusters.
    """
    pairs = {ends: row.bandwidth_gb_per_s for ends, row in found.pairs.items()}
    apart = _cluster(found, [_Link(*row) for row in pairs.items()], (), name)
    apart = with_latencies(apart, [row.latency_s for row in found.pairs.values()])
    for by, groups in _divisions(found, apart):
        inside = [
            _Link((device, switch), width)
            for switch, group in groups.items()
            if len(group) > 1
            for device, width in _ports(_among(pairs, [group]), group, tolerance).items()
        ]
        for shape, outside in _joints(pairs, groups, tolerance):
            if links := [*inside, *outside]:
                cluster = _switched(found, links, groups, name)
                yield Topology(f"{shape}, {by}", cluster, frozenset(range(len(inside))))
    within = _among(pairs, found.devices_of_hosts.values())
    yield Topology(PAIRS, apart, frozenset(n for n, ends in enumerate(pairs) if ends in within))


def _divisions(found: Measurements, apart: Cluster) -> Iterator[tuple[str, Groups]]:
    by_host = found.devices_of_hosts
    yield "grouped by host", by_host
    numbers = apart.link_table.groups
    if numbers is None or found.missing:
        return
    by_width: dict[int, list[str]] = {}
    for member, number in zip(found.members, numbers, strict=True):
        by_width.setdefault(int(number), []).append(member.name)
    if sorted(map(tuple, by_width.values())) != sorted(by_host.values()):
        named = {f"group{n}": tuple(group) for n, group in enumerate(by_width.values())}
        yield "grouped by bandwidth", named


def _joints(pairs: Mapping[Ends, float], groups: Groups, tolerance: float) -> Iterator[Joint]:
    """Yield ways to join the groups."""
    if len(groups) == 1:
        yield "one switch", []
        return
    end = {name: name if len(group) > 1 else group[0] for name, group in groups.items()}
    between = _between(pairs, groups)
    mesh = [_Link((end[a], end[b]), width) for (a, b), width in between.items()]
    if len(groups) == 2:
        yield "a link between switches", mesh
    else:
        uplinks = _ports(between, groups, tolerance)
        star = [_Link((end[name], NETWORK), width) for name, width in uplinks.items()]
        yield "a link from each switch to a network", star
        yield "links between all switches", mesh
    if any(len(group) > 1 for group in groups.values()):
        inside = _among(pairs, groups.values())
        outside = {ends: width for ends, width in pairs.items() if ends not in inside}
        cards = _ports(outside, [d for group in groups.values() for d in group], tolerance)
        own = [_Link((device, NETWORK), width) for device, width in cards.items()]
        yield "a link from each device to a network", own


def _among(widths: Mapping[Ends, float], groups: Iterable[Sequence[str]]) -> dict[Ends, float]:
    """Return the pairs that lie inside one of the groups."""
    group_of = {device: number for number, group in enumerate(groups) for device in group}
    return {
        (a, b): width
        for (a, b), width in widths.items()
        if a in group_of and group_of[a] == group_of.get(b)
    }


def _between(widths: Mapping[Ends, float], groups: Groups) -> dict[Ends, float]:
    """Return the bandwidth between groups: the median over their devices."""
    group_of = {device: name for name, group in groups.items() for device in group}
    found: dict[Ends, list[float]] = {ends: [] for ends in combinations(groups, 2)}
    for (a, b), width in widths.items():
        ends = group_of[a], group_of[b]
        if ends[0] != ends[1]:
            found[ends if ends in found else ends[::-1]].append(width)
    return {ends: median(row) for ends, row in found.items() if row}


def _ports(widths: Mapping[Ends, float], ends: Iterable[str], tolerance: float) -> dict[str, float]:
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


def _switched(found: Measurements, links: Sequence[_Link], groups: Groups, name: str) -> Cluster:
    ends = {end for link in links for end in link.between}
    cluster = _cluster(found, links, [s for s in (*groups, NETWORK) if s in ends], name)
    return with_latencies(cluster, _latencies_s(cluster, found))


def cluster_without_links(found: Measurements, name: str) -> Cluster:
    """Return the measured devices alone, as where there is only one."""
    return _cluster(found, (), (), name)


def _cluster(
    found: Measurements, links: Sequence[_Link], switches: Sequence[str], name: str
) -> Cluster:
    """Return a cluster whose links have no latency yet."""
    data: dict[str, Any] = {
        "format": "pipeplan-cluster/1",
        "name": name,
        "device_types": {kind: row.model_dump() for kind, row in found.types.items()},
        "devices": [{"name": member.name, "type": member.type} for member in found.members],
        "switches": list(switches),
        "links": [
            {
                "between": list(link.between),
                "bandwidth_gb_per_s": significant(link.bandwidth_gb_per_s, MEASURED_DIGITS),
                "latency_us": 0.0,
                "source": "measured",
            }
            for link in links
        ],
        "hosts": [host.model_dump(mode="json") for host in found.hosts.values()],
    }
    return Cluster.parse(data, "measured cluster")


def _latencies_s(cluster: Cluster, found: Measurements) -> list[float]:
    """Return non-negative latencies of links whose sums fit those of pairs best, by least squares.

    Projected gradient descent starts from an even part of each route, so that links with the same
    use get the same latency.
    """
    routes = {ends: cluster.route(*ends) for ends in found.pairs}
    joined = {ends: route for ends, route in routes.items() if route is not None}
    matrix = np.zeros((len(joined), len(cluster.links)))
    for number, route in enumerate(joined.values()):
        matrix[number, [index for index, _ in route.links]] = 1.0
    target = np.array([found.pairs[ends].latency_s for ends in joined])
    latencies = np.full(matrix.shape[1], target.mean() / matrix.sum(axis=1).mean())
    step = 1 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(_STEPS):
        latencies = np.maximum(0.0, latencies - step * matrix.T @ (matrix @ latencies - target))
    return [float(value) for value in latencies]


def with_latencies(cluster: Cluster, latencies_s: Sequence[float]) -> Cluster:
    """Return the cluster with these latencies of its links, in seconds."""
    rounded = [significant(seconds * 1e6, MEASURED_DIGITS) for seconds in latencies_s]
    return with_links(cluster, lambda index: {"latency_us": rounded[index]})


def with_links(cluster: Cluster, change: Callable[[int], Mapping[str, Any]]) -> Cluster:
    """Return the cluster with fields of some links changed, by their indices."""
    links = tuple(link.model_copy(update=change(index)) for index, link in enumerate(cluster.links))
    return cluster.model_copy(update={"links": links})
