"""Which way data takes through a cluster: the widest path, of equally wide ones the quickest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.artifacts.cluster import Cluster

_Rank = Callable[[float, float], float]
"""What to search for, least first, by width in GB/s and latency in seconds."""


@dataclass(frozen=True)
class Route:
    """How data goes from one device to another.

    Attributes:
        links: the resources it occupies: ``(link index, direction)``; direction is 0 for both
            ways of a half-duplex link. Shared links occupy none.
        bandwidth_gb_per_s: of the narrowest link.
        latency_s: the sum along the path.
    """

    links: tuple[tuple[int, int], ...]
    bandwidth_gb_per_s: float
    latency_s: float

    def seconds(self, bytes_: float) -> float:
        """Time to move ``bytes_`` when nothing else uses the path."""
        return self.latency_s + bytes_ / (self.bandwidth_gb_per_s * 1e9)


class Routing:
    """The routes of a cluster, found when they are asked for.

    Args:
        cluster: devices, which do not forward, switches and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.links
        self._devices = cluster.numbers
        self._wires = _wires(cluster)
        self._routes: dict[tuple[str, str], Route] = {}
        self._switch_paths: dict[tuple[str, float, _Rank], dict[str, Route]] = {}

    def route(self, source: str, target: str) -> Route | None:
        """The path from a device to another; None if there is none."""
        if source == target:
            return Route((), float("inf"), 0.0)
        if source in self._ports and target in self._ports:
            return self._route_between_ports(source, target)
        key = (source, target)
        if key not in self._routes:
            for found, route in self._routes_from(source):
                self._routes[source, found] = route
        return self._routes.get(key)

    @cached_property
    def _ports(self) -> dict[str, tuple[int, str]]:
        """The only link, and its switch, of every device that has just one link, to a switch.

        Most devices of most clusters have: their routes differ in the ends only, so that large
        clusters need few searches.
        """
        wires = {name: self._wires[name] for name in self._devices}
        return {
            name: row[0]
            for name, row in wires.items()
            if len(row) == 1 and row[0][1] not in self._devices
        }

    def attachment(self, device: str) -> Hashable:
        """Equal for two devices only if their routes to any third are of equal figures."""
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
        )

    def _route_between_switches(self, start: str, end: str, width_gb_per_s: float) -> Route | None:
        """The quickest path that is as wide as any path, or as ``width_gb_per_s``."""
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
        """The width first, then the quickest among the paths that are wide enough.

        One search for both is not enough: a wide start of a path gains nothing where a narrow
        link follows, and may take longer.
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
        """Dijkstra's algorithm over paths through switches along links that are wide enough.

        Finds the devices, or the switches if these are asked for.
        """
        heap: list[tuple[float, int, str, tuple[tuple[int, int], ...], float, float]]
        heap = [(0.0, 0, source, (), float("inf"), 0.0)]
        done: set[str] = set()
        while heap:
            _, hops, vertex, links, width, latency_s = heappop(heap)
            if vertex in done:
                continue
            done.add(vertex)
            if vertex != source and (switches or vertex in self._devices):
                yield vertex, Route(links, width, latency_s)
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
                resources = (*links, *self._resource(index, vertex))
                heappush(
                    heap, (rank(least, total_s), hops + 1, neighbour, resources, least, total_s)
                )

    def _resource(self, index: int, start: str) -> tuple[tuple[int, int], ...]:
        link = self._links[index]
        if link.shared:
            return ()
        if link.duplex == "half":
            return ((index, 0),)
        return ((index, 1 if start == link.between[0] else -1),)


def _wires(cluster: Cluster) -> dict[str, list[tuple[int, str]]]:
    """The links at each vertex, parallel ones included, with their other ends."""
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
