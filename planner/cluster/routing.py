"""Routes through a cluster: the widest path, of equally wide ones the one of least latency.

Among paths that are equal in both, the one with the fewest links is taken, then the first by the
names on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster

Edges = tuple[tuple[str, str], ...]
"""Pairs of devices, each with the one it sends to."""
Messages = tuple[tuple[float, float], ...]
"""Seconds of latency and GB/s of messages."""
MOST_KEPT = 5_000
"""Sets of edges whose messages are kept at a time."""
_Rank = Callable[[float, float], float]
"""The value that a search minimises, by width in GB/s and latency in seconds."""
_Found = tuple[
    float,
    int,
    tuple[str, ...],
    tuple[tuple[bool, str, str, int], ...],
    tuple[tuple[int, int], ...],
    float,
    float,
]
"""A path in the search: its rank, its number of links, the names on it, a key for parallel links of
equal figures (so that their order in the file does not matter), the resources that it occupies, its
bandwidth and its latency."""


@dataclass(frozen=True)
class Route:
    """The route from one device to another.

    Attributes:
        links: link resources that it occupies: ``(link index, direction)``; direction is 0 for both
            directions of a half-duplex link. Shared links are not among them.
        bandwidth_gb_per_s: bandwidth of the narrowest link.
        latency_s: sum of latencies along the path.
        crossed: indices of all its links, including shared ones.
    """

    links: tuple[tuple[int, int], ...]
    bandwidth_gb_per_s: float
    latency_s: float
    crossed: tuple[int, ...] = ()

    def seconds(self, bytes_: float) -> float:
        """Return the time to move ``bytes_`` over the otherwise idle path."""
        return self.latency_s + bytes_ / (self.bandwidth_gb_per_s * 1e9)


class Routing:
    """The routes of a cluster, computed on demand.

    Args:
        cluster: devices, which do not forward, switches and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.links
        self._devices = cluster.numbers
        self._wires = _wires(cluster)
        self._routes: dict[tuple[str, str], Route] = {}
        self._switch_paths: dict[tuple[str, float, _Rank], dict[str, Route]] = {}
        self._at_once: dict[Edges, Messages | None] = {}

    def route(self, source: str, target: str) -> Route | None:
        """Return the path from a device to another; None if there is none."""
        if source == target:
            return Route((), float("inf"), 0.0)
        if source in self._ports and target in self._ports:
            return self._route_between_ports(source, target)
        key = (source, target)
        if key not in self._routes:
            for found, route in self._routes_from(source):
                self._routes[source, found] = route
        return self._routes.get(key)

    def at_once(self, edges: Edges) -> Messages | None:
        """Return the latency and bandwidth of messages sent along all edges at the same time.

        Those that use the same link share its bandwidth. Equal ones are left out.

        Returns:
            Seconds and GB/s; None if some edge has no path.
        """
        if edges not in self._at_once:
            if len(self._at_once) >= MOST_KEPT:
                self._at_once.clear()
            found = [route for edge in edges if (route := self.route(*edge)) is not None]
            sharing = Counter(link for route in found for link in route.links)
            is_joined = len(found) == len(edges)
            self._at_once[edges] = self._sharing(found, sharing) if is_joined else None
        return self._at_once[edges]

    def _sharing(self, known: Sequence[Route], sharing: Mapping[tuple[int, int], int]) -> Messages:
        widths = (
            min(
                (self._links[link[0]].bandwidth_gb_per_s / sharing[link] for link in route.links),
                default=route.bandwidth_gb_per_s,
            )
            for route in known
        )
        return tuple(
            dict.fromkeys(
                (route.latency_s, min(width, route.bandwidth_gb_per_s))
                for route, width in zip(known, widths, strict=True)
            )
        )

    @cached_property
    def _ports(self) -> dict[str, tuple[int, str]]:
        """The link and switch of every device whose only link leads to a switch.

        This holds for most devices of most clusters. Their routes differ only at the ends, so large
        clusters need few searches.
        """
        wires = {name: self._wires[name] for name in self._devices}
        return {
            name: row[0]
            for name, row in wires.items()
            if len(row) == 1 and row[0][1] not in self._devices
        }

    def attachment(self, device: str) -> Hashable:
        """Return a key that is equal only for devices with equal routes to any third."""
        if device not in self._ports:
            return device
        index, switch = self._ports[device]
        link = self._links[index]
        return switch, link.bandwidth_gb_per_s, link.latency_us, link.shared, link.duplex

    def _route_between_ports(self, source: str, target: str) -> Route | None:
        (first, start), (last, end) = self._ports[source], self._ports[target]
        width = min(self._links[first].bandwidth_gb_per_s, self._links[last].bandwidth_gb_per_s)
        middle = self._route_between_switches(start, end, width)
        if middle is None:
            return None
        ends_us = self._links[first].latency_us + self._links[last].latency_us
        return Route(
            (*self._resource(first, source), *middle.links, *self._resource(last, end)),
            min(width, middle.bandwidth_gb_per_s),
            middle.latency_s + ends_us * 1e-6,
            (first, *middle.crossed, last),
        )

    def _route_between_switches(self, start: str, end: str, width_gb_per_s: float) -> Route | None:
        """Return the route of least latency that has the most bandwidth, or ``width_gb_per_s``."""
        if start == end:
            return Route((), float("inf"), 0.0)
        widest = self._paths_of_switch(start, 0.0, _by_width).get(end)
        if widest is None:
            return None
        least = min(width_gb_per_s, widest.bandwidth_gb_per_s)
        return self._paths_of_switch(start, least, _by_latency)[end]

    def _paths_of_switch(self, start: str, least: float, rank: _Rank) -> dict[str, Route]:
        key = (start, least, rank)
        if key not in self._switch_paths:
            self._switch_paths[key] = dict(self._search(start, least, rank, switches=True))
        return self._switch_paths[key]

    def _routes_from(self, source: str) -> Iterator[tuple[str, Route]]:
        """Find the width first, then the path of least latency among those that are wide enough.

        One search for both is not enough: a wide start of a path gains nothing if a narrow link
        follows, and may have more latency.
        """
        widest = self._search(source, 0.0, _by_width)
        widths = {target: route.bandwidth_gb_per_s for target, route in widest}
        for least in sorted(set(widths.values())):
            for target, route in self._search(source, least, _by_latency):
                if widths[target] == least:
                    yield target, route

    def _search(
        self,
        source: str,
        least_gb_per_s: float,
        rank: _Rank,
        *,
        switches: bool = False,
    ) -> Iterator[tuple[str, Route]]:
        """Run Dijkstra's algorithm over paths through switches along links that are wide enough.

        Finds routes to devices, or to switches if ``to_switches``.
        """
        heap: list[_Found] = [(0.0, 0, (source,), (), (), float("inf"), 0.0)]
        done: set[str] = set()
        while heap:
            _, hops, path, alike, links, width, latency_s = heappop(heap)
            vertex = path[-1]
            if vertex in done:
                continue
            done.add(vertex)
            if vertex != source and (switches or vertex in self._devices):
                yield vertex, Route(links, width, latency_s, tuple(row[-1] for row in alike))
                if not switches:
                    continue
            for index, neighbour in self._wires[vertex]:
                link = self._links[index]
                if link.bandwidth_gb_per_s < least_gb_per_s or neighbour in done:
                    continue
                if switches and neighbour in self._devices:
                    continue
                least = min(width, link.bandwidth_gb_per_s)
                total_s = latency_s + link.latency_us * 1e-6
                kind = (not link.shared, link.duplex, link.source, index)
                further = (*path, neighbour), (*alike, kind)
                resources = (*links, *self._resource(index, vertex))
                heappush(
                    heap, (rank(least, total_s), hops + 1, *further, resources, least, total_s)
                )

    def _resource(self, index: int, start: str) -> tuple[tuple[int, int], ...]:
        link = self._links[index]
        return () if link.shared else ((index, link.direction_from(start)),)


def _wires(cluster: Cluster) -> dict[str, list[tuple[int, str]]]:
    """Return the links at each vertex, parallel ones included, with their other ends."""
    wires: dict[str, list[tuple[int, str]]] = {
        name: [] for name in (*cluster.device_names, *cluster.switches)
    }
    for index, link in enumerate(cluster.links):
        first, second = link.between
        wires[first].append((index, second))
        wires[second].append((index, first))
    return wires


def _by_width(width_gb_per_s: float, latency_s: float) -> float:
    return -width_gb_per_s


def _by_latency(width_gb_per_s: float, latency_s: float) -> float:
    return latency_s
