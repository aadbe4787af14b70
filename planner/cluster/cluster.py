"""The cluster: devices, switches and links in any topology."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import networkx as nx
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.cluster.cluster_file import FORMAT as FILE_FORMAT
from planner.cluster.cluster_file import (
    ClusterFile,
    Currency,
    Host,
    Name,
    cluster_json,
    cluster_toml,
)
from planner.cluster.hardware import DeviceType, LinkType, Price
from planner.cluster.link_table import LinkTable
from planner.cluster.measured_links import contradictions
from planner.cluster.routing import Edges, Messages, Route, Routing
from planner.records.document import (
    MOST_ENTRIES,
    Record,
    write_atomically,
)
from planner.units import plural

logger = logging.getLogger(__name__)

FORMAT = FILE_FORMAT


class Device(Record):
    """One accelerator.

    Attributes:
        name: Name of the device, such as ``n0/gpu3``.
        type: Its device type.
        price_per_hour: Price of this device, instead of its type's.
    """

    name: Name
    type: str
    price_per_hour: Price | None = None

    @model_serializer(mode="wrap")
    def _without_missing_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave a missing price out, so that digests of clusters without prices do not change."""
        return _without_missing(dump(self), "price_per_hour")


class Link(LinkType):
    """A link between two vertices.

    Attributes:
        between: The two ends: devices or switches.
    """

    between: tuple[Name, Name]

    def direction_from(self, end: str) -> int:
        """Return in which direction one of the ends sends: 1, -1, or 0 where both are one."""
        return 0 if self.duplex == "half" else 1 if end == self.between[0] else -1


class Cluster(Record):
    """Devices, switches and links, all written out; :meth:`load` expands nodes.

    Attributes:
        format: ``pipeplan-cluster/1``.
        name: Name of the cluster, for people.
        currency: Currency of all prices.
        device_types: Figures of every device type, by name.
        devices: All devices.
        switches: Names of switches, which only forward.
        links: All links.
        hosts: Devices that slow each other, host by host; others compute undisturbed.
    """

    format: Literal["pipeplan-cluster/1"] = "pipeplan-cluster/1"
    name: str = "cluster"
    currency: Currency | None = None
    device_types: dict[str, DeviceType]
    devices: Annotated[tuple[Device, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    switches: Annotated[tuple[Name, ...], Field(max_length=MOST_ENTRIES)] = ()
    links: Annotated[tuple[Link, ...], Field(max_length=MOST_ENTRIES)] = ()
    hosts: tuple[Host, ...] = ()

    def __repr__(self) -> str:
        """Return the numbers of devices, switches and links, in a line."""
        return (
            f"<Cluster: {self.name}, {plural(len(self.devices), 'device')}, "
            f"{plural(len(self.switches), 'switch', 'es')}, {plural(len(self.links), 'link')}>"
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file: TOML as people write it, or JSON as in a plan.

        Measured links that contradict the rest of the file are logged.

        Raises:
            PipeplanError: naming every wrong field, and every figure that no real device or link
                has.
        """
        file = ClusterFile.load(path)
        return cls._of_file(file, str(path))

    def save(self, path: str | Path) -> None:
        """Write the cluster, all written out, atomically; :meth:`load` reads it.

        The file is JSON if its name ends in ``.json``, else TOML.
        """
        is_json = str(path).endswith(".json")
        write_atomically(path, cluster_json(self) if is_json else cluster_toml(self))

    @classmethod
    def from_data(cls, data: Any, source: str = "cluster") -> Cluster:
        """Expand plain data of a cluster file; an expanded cluster stays as it is.

        Measured links that contradict the rest of the data are logged. Figures that no real device
        or link has are refused in files only: programs take such ones for "no limit".

        Args:
            data: content of a cluster file, as dicts, lists, texts, numbers and booleans.
            source: its name in messages.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls._of_file(ClusterFile.from_data(data, source), source)

    @classmethod
    def _of_file(cls, file: ClusterFile, source: str) -> Cluster:
        cluster = cls.parse(file.expanded(source), source)
        for contradiction in contradictions(cluster):
            logger.warning("%s: %s", source, contradiction)
        return cluster

    @model_serializer(mode="wrap")
    def _without_missing_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = _without_missing(dump(self), "currency")
        if not self.hosts:
            data.pop("hosts", None)
        return data

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
        self._check_hosts()
        return self

    def _check_hosts(self) -> None:
        known = {device.name for device in self.devices}
        for name, count in Counter(name for host in self.hosts for name in host.devices).items():
            if name not in known:
                raise ValueError(
                    f"hosts: unknown device {name!r}; correct the name or add it to devices"
                )
            if count > 1:
                raise ValueError(f"hosts: device {name!r} is named twice; keep it in one host")

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of all devices, in file order."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Positions of the devices in file order, by name."""
        return {name: number for number, name in enumerate(self.device_names)}

    @cached_property
    def _types(self) -> dict[str, str]:
        return {device.name: device.type for device in self.devices}

    def type_of(self, device: str) -> str:
        """Return the name of a device's type."""
        return self._types[device]

    def device_type(self, device: str) -> DeviceType:
        """Return the type of a device."""
        return self.device_types[self._types[device]]

    @cached_property
    def host_of(self) -> dict[str, Host]:
        """The hosts of devices that are slowed by others, by device."""
        slowing = (host for host in self.hosts if host.is_slowed)
        return {name: host for host in slowing for name in host.devices}

    @cached_property
    def slowed_by_communication(self) -> dict[str, float]:
        """Factors on the computation of devices that their own communication slows, by device."""
        return self._factors(lambda kind: kind.compute_slowdown_while_communicating)

    @cached_property
    def slows_communication(self) -> dict[str, float]:
        """Factors on communication of devices whose computation slows it, by device."""
        return self._factors(lambda kind: kind.communication_slowdown_while_computing)

    def _factors(self, factor_of: Callable[[DeviceType], float]) -> dict[str, float]:
        """Return the factors of devices' types that are not 1."""
        factors = {device.name: factor_of(self.device_type(device.name)) for device in self.devices}
        return {name: factor for name, factor in factors.items() if factor > 1}

    @cached_property
    def prices_per_hour(self) -> dict[str, float | None]:
        """Price of each device, by name; None if neither it nor its type has one."""
        return {
            device.name: self.device_types[device.type].price_per_hour
            if device.price_per_hour is None
            else device.price_per_hour
            for device in self.devices
        }

    @cached_property
    def graph(self) -> nx.Graph:
        """The cluster as a networkx graph of devices and switches.

        Edges carry ``index`` into ``links``. Of parallel links the one with the most bandwidth is
        kept, then the one with the least latency.
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
    def _routing(self) -> Routing:
        return Routing(self)

    def route(self, source: str, target: str) -> Route | None:
        """Return the widest path, of these the one of least latency; None if there is none.

        Devices do not forward.
        """
        return self._routing.route(source, target)

    def at_once(self, edges: Edges) -> Messages | None:
        """Return the latency and bandwidth of messages sent along all edges at the same time.

        Those that use the same link share its bandwidth.

        Returns:
            Seconds and GB/s of unlike messages; None if some edge has no path.
        """
        return self._routing.at_once(edges)

    def attachment(self, device: str) -> Hashable:
        """Return a key of a device's attachment to the network.

        It is equal for two devices only if their routes to any third have equal figures.
        """
        return self._routing.attachment(device)

    @cached_property
    def link_table(self) -> LinkTable:
        """Latency and bandwidth between all pairs of devices."""
        return LinkTable(self)

    def link_name(self, resource: tuple[int, int]) -> str:
        """Return a readable name of a link resource: ``n0>tor``, or ``a-b`` if half duplex."""
        first, second = self.links[resource[0]].between
        return {0: f"{first}-{second}", 1: f"{first}>{second}", -1: f"{second}>{first}"}[
            resource[1]
        ]


def node_name(device: str) -> str | None:
    """Return the node that a device's name begins with: ``n0`` of ``n0/gpu3``; None without one."""
    return device.rpartition("/")[0] or None


def node_of(device: str) -> str:
    """Return the node of a device; one whose name has none is a node of its own."""
    return node_name(device) or device


def _without_missing(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove a field that has no value, if the caller's dump has not done so."""
    if data.get(name) is None:
        data.pop(name, None)
    return data


def _is_better(link: Link, other: Link) -> bool:
    return (link.bandwidth_gb_per_s, -link.latency_us) > (
        other.bandwidth_gb_per_s,
        -other.latency_us,
    )
