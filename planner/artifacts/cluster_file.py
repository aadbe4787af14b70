"""The cluster file as people write it: presets by name, nodes as shorthand for many links."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from planner.artifacts.document import Record
from planner.artifacts.hardware import (
    DeviceType,
    LinkType,
    NonNegative,
    Positive,
    Price,
    Source,
)
from planner.artifacts.presets import DEVICES, LINKS
from planner.errors import PipeplanError

FORMAT = "pipeplan-cluster/1"
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_./:-]{1,120}$")]
NodeName = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_./:-]{1,110}$")]
"""A name that still is one with /gpu0 behind it."""
DeviceTypeName = Annotated[Text, Field(json_schema_extra={"examples": list(DEVICES)})]
LinkTypeName = Annotated[Text, Field(json_schema_extra={"examples": list(LINKS)})]
"""Examples are what editors offer; a file's own types are names as well."""
Currency = Annotated[str, Field(min_length=1, max_length=20, pattern=r"^\S+$")]
"""Such as EUR."""


class DeviceEntry(Record):
    """A single device.

    Attributes:
        name: that links, plans and tables call it by.
        type: a preset, or a name in ``device_types``.
        price_per_hour: its own, in place of its type's.
    """

    name: Name
    type: DeviceTypeName
    price_per_hour: Price | None = None


class NodeEntry(Record):
    """Equal devices around an inner switch: shorthand for devices, a switch and links.

    Attributes:
        name: of the switch, at which links to other machines end; the devices are called
            NAME/gpu0, NAME/gpu1, …
        devices: how many.
        type: of each: a preset, or a name in ``device_types``.
        link: from each device to the switch: a preset, a name in ``link_types``, or a table of
            its figures.
        price_per_hour: of the whole node, in place of its devices' by their type.
    """

    name: NodeName
    devices: Annotated[int, Field(ge=1, le=4096)]
    type: DeviceTypeName
    link: LinkTypeName | LinkType
    price_per_hour: Price | None = None

    @property
    def entries(self) -> Iterator[dict[str, Any]]:
        """Its devices, each with an equal part of the price."""
        price = {}
        if self.price_per_hour is not None:
            price = {"price_per_hour": self.price_per_hour / self.devices}
        for index in range(self.devices):
            yield {"name": f"{self.name}/gpu{index}", "type": self.type, **price}


class LinkEntry(Record):
    """A link: a preset, or its own figures; figures given beside a preset replace the preset's.

    Attributes:
        between: its two ends, devices, switches or nodes.
        preset: a preset, or a name in ``link_types``.
        bandwidth_gb_per_s: of each direction; without a preset it has to be given.
        latency_us: of every message; 0 without a preset.
        duplex: ``full`` carries one transfer a direction at a time, ``half`` one in all.
        shared: carries any number of transfers, each at its full bandwidth.
        source: where the figures come from.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["preset"]}, {"required": ["bandwidth_gb_per_s"]}]
        }
    )

    between: tuple[Name, Name]
    preset: LinkTypeName | None = None
    bandwidth_gb_per_s: Positive | None = None
    latency_us: NonNegative | None = None
    duplex: Literal["full", "half"] | None = None
    shared: bool | None = None
    source: Source | None = None


class ClusterFile(Record):
    """What a cluster file may hold: devices, nodes (shorthand for devices), switches and links.

    Attributes:
        format: ``pipeplan-cluster/1``.
        name: for people.
        currency: of all prices, such as EUR.
        device_types: figures of device types by name; over presets of the same name.
        devices: single devices.
        nodes: machines of equal devices.
        switches: names of vertices that only hand on.
        link_types: figures of link types by name; over presets of the same name.
        links: what joins devices, switches and nodes.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"minItems": 1}}}
                for name in ("nodes", "devices")
            ]
        }
    )

    format: Literal["pipeplan-cluster/1"]
    name: Text = "cluster"
    currency: Currency | None = None
    device_types: dict[str, DeviceType] = Field(default_factory=dict)
    devices: tuple[DeviceEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()
    switches: tuple[Name, ...] = ()
    link_types: dict[str, LinkType] = Field(default_factory=dict)
    links: tuple[LinkEntry, ...] = ()

    def expanded(self, source: str) -> dict[str, Any]:
        """The data of a Cluster: every device, switch and link written out.

        Raises:
            PipeplanError: naming every unknown preset and every link without a bandwidth.
        """
        problems: list[str] = []
        devices = [device.model_dump(exclude_none=True) for device in self.devices]
        devices += [entry for node in self.nodes for entry in node.entries]
        links = [*self._node_links(problems), *self._own_links(problems)]
        types = {}
        for name in dict.fromkeys([*(device["type"] for device in devices), *self.device_types]):
            types[name] = self._device_type(name, problems)
        if not devices:
            problems.append("devices: the cluster has none; add [[nodes]] or [[devices]]")
        if problems:
            raise PipeplanError(f"{source}: {problem}" for problem in problems)
        return {
            "format": self.format,
            "name": self.name,
            "currency": self.currency,
            "device_types": types,
            "devices": devices,
            "switches": [*self.switches, *(node.name for node in self.nodes)],
            "links": links,
        }

    def _device_type(self, name: str, problems: list[str]) -> dict[str, Any]:
        known = {**DEVICES, **self.device_types}
        if name not in known:
            problems.append(
                f'device type {name!r} is unknown; define [device_types."{name}"] or use one of '
                + ", ".join(sorted(known))
            )
            return {}
        return known[name].model_dump()

    def _link_type(self, name: str, field: str, problems: list[str]) -> dict[str, Any]:
        known = {**LINKS, **self.link_types}
        if name not in known:
            problems.append(
                f'{field}: link preset {name!r} is unknown; define [link_types."{name}"] or use '
                "one of " + ", ".join(sorted(known))
            )
            return {}
        return known[name].model_dump()

    def _node_links(self, problems: list[str]) -> Iterator[dict[str, Any]]:
        for position, node in enumerate(self.nodes):
            if isinstance(node.link, LinkType):
                kind = node.link.model_dump()
            else:
                kind = self._link_type(node.link, f"nodes[{position}].link", problems)
            for index in range(node.devices):
                yield {"between": [f"{node.name}/gpu{index}", node.name], **kind}

    def _own_links(self, problems: list[str]) -> Iterator[dict[str, Any]]:
        for position, entry in enumerate(self.links):
            field = f"links[{position}]"
            own = entry.model_dump(exclude={"between", "preset"}, exclude_none=True)
            kind = {} if entry.preset is None else self._link_type(entry.preset, field, problems)
            if entry.preset is None and entry.bandwidth_gb_per_s is None:
                problems.append(
                    f"{field}: give bandwidth_gb_per_s or a preset for the link between "
                    f"{entry.between[0]!r} and {entry.between[1]!r}"
                )
            yield {"between": list(entry.between), **kind, **own}
