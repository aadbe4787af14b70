"""The cluster: devices, switches and links, wired however they are wired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import networkx as nx
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.artifacts.cluster_file import FORMAT as FILE_FORMAT
from planner.artifacts.cluster_file import ClusterFile, Currency, Name
from planner.artifacts.cluster_toml import cluster_toml
from planner.artifacts.document import Record, read_json, read_toml, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.hardware import DeviceType, LinkType, Price
from planner.artifacts.link_table import LinkTable

FORMAT = FILE_FORMAT
_Rank = Callable[[float, float], float]
"""What to search for, least first, by width in GB/s and latency in seconds."""


class Device(Record):
    """One accelerator.

    Attributes:
        name: such as ``n0/gpu3``.
        type: its name in ``device_types``.
        price_per_hour: its own, in place of its type's.
    """

    name: Name
    type: str
    price_per_hour: Price | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Clusters without prices keep the digests they had before there were any."""
        return _told(dump(self), "price_per_hour")


class Link(LinkType):
    """A link between two vertices.

    Attributes:
        between: the two, devices or switches.
    """

    between: tuple[Name, Name]


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


class Cluster(Record):
    """Devices, switches and links, with nothing abbreviated; :meth:`load` expands nodes.

    Attributes:
        format: ``pipeplan-cluster/1``.
        name: for people.
        currency: of all prices.
        device_types: figures of every device type by name.
        devices: every device.
        switches: names of vertices that only hand on.
        links: every link.
    """

    format: Literal["pipeplan-cluster/1"] = "pipeplan-cluster/1"
    name: str = "cluster"
    currency: Currency | None = None
    device_types: dict[str, DeviceType]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    switches: tuple[Name, ...] = ()
    links: tuple[Link, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file: TOML as people write it, or JSON as a plan holds it.

        Raises:
            PipeplanError: naming every wrong field.
        """
        source = str(path)
        data = read_json(path) if source.endswith(".json") else read_toml(path)
        return cls.from_data(data, source)

    def save(self, path: str | Path) -> None:
        """Write the cluster with nothing abbreviated, atomically, in the form :meth:`load` reads.

        JSON if the name ends in ``.json``, else TOML.
        """
        is_json = str(path).endswith(".json")
        write_atomically(
            path, self.model_dump_json(indent=1) + "\n" if is_json else cluster_toml(self)
        )

    @classmethod
    def from_data(cls, data: Any, source: str = "cluster") -> Cluster:
        """Expand plain data in the form of a cluster file; an expanded cluster stays as it is."""
        data = check_format(data, FORMAT, source)
        return cls.parse(ClusterFile.parse(data, source).expanded(source), source)

    @model_serializer(mode="wrap")
    def _without_what_is_not_told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _told(dump(self), "currency")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        vertices = [device.name for device in self.devices] + list(self.switches)
        for name, count in Counter(vertices).items():
            if count > 1:
                raise ValueError(
                    f"devices: name {name!r} is used twice; give every device and switch its own"
                )
        for device in self.devices:
            if device.type not in self.device_types:
                raise ValueError(
                    f"devices: {device.name!r} has unknown type {device.type!r}; add it to "
                    "device_types"
                )
        known = set(vertices)
        for link in self.links:
            for end in link.between:
                if end not in known:
                    first, second = link.between
                    raise ValueError(
                        f"links: the link between {first!r} and {second!r} ends at unknown device "
                        f"or switch {end!r}; correct the name or add it to switches"
                    )
            if link.between[0] == link.between[1]:
                raise ValueError(
                    f"links: one joins {link.between[0]!r} to itself; name its other end"
                )
        return self

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of all devices, in file order."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Places of the devices in file order."""
        return {name: number for number, name in enumerate(self.device_names)}

    @cached_property
    def _types(self) -> dict[str, str]:
        return {device.name: device.type for device in self.devices}

    def type_of(self, device: str) -> str:
        """Name of a device's type."""
        return self._types[device]

    def device_type(self, device: str) -> DeviceType:
        """What a device can do."""
        return self.device_types[self._types[device]]

    @cached_property
    def prices_per_hour(self) -> dict[str, float | None]:
        """What each device costs, by its name; None where neither it nor its type has a price."""
        return {
            device.name: self.device_types[device.type].price_per_hour
            if device.price_per_hour is None
            else device.price_per_hour
            for device in self.devices
        }

    @cached_property
    def graph(self) -> nx.Graph:
        """Vertices are devices and switches; edges carry ``index`` into ``links``.

        Of parallel links the widest is kept, of equally wide ones the quickest.
        """
        graph = nx.Graph(name=self.name)
        graph.add_nodes_from(self.device_names, kind="device")
        graph.add_nodes_from(self.switches, kind="switch")
        for index, link in enumerate(self.links):
            old = graph.get_edge_data(*link.between)
            if old is None or _is_better(link, self.links[old["index"]]):
                graph.add_edge(*link.between, index=index)
        return graph

    @cached_property
    def _routes(self) -> dict[tuple[str, str], Route]:
        return {}

    def route(self, source: str, target: str) -> Route | None:
        """The widest path, then the one of least latency; devices do not forward. None if none."""
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
        wires = {name: self._wires[name] for name in self.device_names}
        return {
            name: row[0]
            for name, row in wires.items()
            if len(row) == 1 and row[0][1] not in self._types
        }

    @cached_property
    def link_table(self) -> LinkTable:
        """Latency and bandwidth between all pairs of devices."""
        return LinkTable(self)

    def attachment(self, device: str) -> Hashable:
        """Equal for two devices only if their routes to any third are of equal figures."""
        if device not in self._ports:
            return device
        index, switch = self._ports[device]
        link = self.links[index]
        return switch, link.bandwidth_gb_per_s, link.latency_us, link.shared, link.duplex

    def _route_between_ports(self, source: str, target: str) -> Route | None:
        (first, start), (last, end) = self._ports[source], self._ports[target]
        width = min(self.links[first].bandwidth_gb_per_s, self.links[last].bandwidth_gb_per_s)
        middle = self._route_between_switches(start, end, width)
        if middle is None:
            return None
        ends_us = self.links[first].latency_us + self.links[last].latency_us
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

    @cached_property
    def _switch_paths(self) -> dict[tuple[str, float, _Rank], dict[str, Route]]:
        return {}

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
            if vertex != source and (switches or vertex in self._types):
                yield vertex, Route(links, width, latency_s)
                if not switches:
                    continue
            for index, neighbour in self._wires[vertex]:
                link = self.links[index]
                if link.bandwidth_gb_per_s < least_gb_per_s or neighbour in done:
                    continue
                if switches and neighbour in self._types:
                    continue
                least = min(width, link.bandwidth_gb_per_s)
                total_s = latency_s + link.latency_us * 1e-6
                resources = (*links, *self._resource(index, vertex))
                heappush(
                    heap, (rank(least, total_s), hops + 1, neighbour, resources, least, total_s)
                )

    @cached_property
    def _wires(self) -> dict[str, list[tuple[int, str]]]:
        """The links at each vertex, parallel ones included, with their other ends."""
        wires: dict[str, list[tuple[int, str]]] = {
            name: [] for name in (*self.device_names, *self.switches)
        }
        for index, link in enumerate(self.links):
            first, second = link.between
            wires[first].append((index, second))
            wires[second].append((index, first))
        return wires

    def _resource(self, index: int, start: str) -> tuple[tuple[int, int], ...]:
        link = self.links[index]
        if link.shared:
            return ()
        if link.duplex == "half":
            return ((index, 0),)
        return ((index, 1 if start == link.between[0] else -1),)

    def link_name(self, resource: tuple[int, int]) -> str:
        """Readable name of a link resource, such as ``n0>tor`` or ``a-b`` when half duplex."""
        first, second = self.links[resource[0]].between
        return {0: f"{first}-{second}", 1: f"{first}>{second}", -1: f"{second}>{first}"}[
            resource[1]
        ]


def _told(data: dict[str, Any], name: str) -> dict[str, Any]:
    """A field is left out where it has no value; who dumps may have left it out."""
    if data.get(name) is None:
        data.pop(name, None)
    return data


def _by_width(width_gb_per_s: float, latency_s: float) -> float:
    return -width_gb_per_s


def _by_latency(width_gb_per_s: float, latency_s: float) -> float:
    return latency_s


def _is_better(link: Link, other: Link) -> bool:
    return (link.bandwidth_gb_per_s, -link.latency_us) > (
        other.bandwidth_gb_per_s,
        -other.latency_us,
    )
