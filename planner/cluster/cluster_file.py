"""The cluster file as people write it: presets by name, and nodes as shorthand for many links."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from planner.cluster.hardware import (
    DeviceType,
    LinkType,
    NonNegative,
    Positive,
    Price,
    Slowdown,
    Source,
    check_slowdown,
)
from planner.cluster.measured_links import contradict
from planner.cluster.presets import DEVICES, LINKS
from planner.cluster.usual_figures import OVERRIDE, require_usual, unusual_figures
from planner.errors import PipeplanError, near
from planner.records.document import Record, read_toml_or_json
from planner.records.formats import check_format

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster


logger = logging.getLogger(__name__)

FORMAT = "pipeplan-cluster/1"
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_./:-]{1,120}$")]
NodeName = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_./:-]{1,110}$")]
"""A name that is still valid with ``/gpu0`` appended."""
DeviceTypeName = Annotated[Text, Field(json_schema_extra={"examples": list(DEVICES)})]
LinkTypeName = Annotated[Text, Field(json_schema_extra={"examples": list(LINKS)})]
"""Examples for editors; types defined in the file are names as well."""
Currency = Annotated[str, Field(min_length=1, max_length=20, pattern=r"^\S+$")]
"""A currency, such as EUR."""


class DeviceEntry(Record):
    """A single device.

    Attributes:
        name: Name of the device.
        type: Preset, or a name in ``device_types``.
        price_per_hour: Price of this device, instead of its type's.
    """

    name: Name
    type: DeviceTypeName
    price_per_hour: Price | None = None


class NodeEntry(Record):
    """Equal devices around an inner switch: shorthand for devices, a switch and links.

    Attributes:
        name: Name of the node and its inner switch, where links to other machines end; its devices
            are NAME/gpu0, NAME/gpu1, …
        devices: Number of devices.
        type: Device type of all its devices.
        link: Link from each device to the inner switch: a preset, a name in ``link_types``, or a
            table.
        price_per_hour: Price of the whole node, instead of the sum of its devices.
        slowdown: Factors on the time of computation while one, two, … all of its devices compute,
            where they share cores or memory; left out, they compute undisturbed.
    """

    name: NodeName
    devices: Annotated[int, Field(ge=1, le=4096)]
    type: DeviceTypeName
    link: LinkTypeName | LinkType
    price_per_hour: Price | None = None
    slowdown: Slowdown | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.slowdown is not None:
            check_slowdown(self.slowdown, self.devices)
        return self

    @property
    def host(self) -> dict[str, Any]:
        """The host of its devices."""
        return {"devices": [row["name"] for row in self.entries], "slowdown": self.slowdown}

    @property
    def entries(self) -> Iterator[dict[str, Any]]:
        """The node's devices, each with an equal part of the price."""
        price = {}
        if self.price_per_hour is not None:
            price = {"price_per_hour": self.price_per_hour / self.devices}
        for index in range(self.devices):
            yield {"name": f"{self.name}/gpu{index}", "type": self.type, **price}


class Host(Record):
    """Devices that share the cores or the memory of a machine, and so slow each other.

    Attributes:
        devices: The devices, each in one host at most.
        slowdown: Factors on the time of computation while one, two, … all of the devices compute.
    """

    devices: Annotated[tuple[Name, ...], Field(min_length=1)]
    slowdown: Slowdown

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        check_slowdown(self.slowdown, len(self.devices))
        return self

    @property
    def is_slowed(self) -> bool:
        """Whether its devices slow each other at all."""
        return self.slowdown[-1] > 1

    @property
    def work(self) -> tuple[float, ...]:
        """How many devices' worth of computation one, two, … all of its devices do at a time."""
        return tuple(count / factor for count, factor in enumerate(self.slowdown, 1))

    @property
    def capacity(self) -> float:
        """The most devices' worth of computation that it does at a time."""
        return max(self.work)

    def of(self, devices: Collection[str]) -> Host | None:
        """Return the host with those of its devices alone; None if it has none of them."""
        kept = tuple(name for name in self.devices if name in devices)
        if not kept:
            return None
        return Host(devices=kept, slowdown=self.slowdown[: len(kept)])


class LinkEntry(Record):
    """A link: a preset, its own figures, or a preset with some figures replaced.

    Attributes:
        between: The two ends: devices, switches or nodes.
        preset: Preset, or a name in ``link_types``.
        bandwidth_gb_per_s: Bandwidth per direction; required without a preset.
        latency_us: Latency of a message; 0 without a preset.
        duplex: ``full``: one transfer per direction at a time; ``half``: one in total.
        shared: Whether any number of transfers run at full bandwidth each.
        source: Source of the figures.
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


CARDS_GBIT_PER_S = frozenset((10, 25, 40, 56, 100, 200, 400, 800))
"""Speeds by which network cards are named, in Gbit/s."""


def _with_presets(data: Any) -> Any:
    """Complete device types that have the name of a preset and only some figures of their own."""
    types = data.get("device_types") if isinstance(data, dict) else None
    if not isinstance(types, dict):
        return data
    needed = {name for name, row in DeviceType.model_fields.items() if row.is_required()}
    completed = {
        name: {**DEVICES[name].model_dump(mode="json"), **own}
        if name in DEVICES and isinstance(own, dict) and needed - own.keys()
        else own
        for name, own in types.items()
    }
    return {**data, "device_types": completed}


class ClusterFile(Record):
    """The contents of a cluster file: devices, nodes (shorthand for devices), switches and links.

    Attributes:
        format: ``pipeplan-cluster/1``.
        name: Name of the cluster, for people.
        currency: Currency of all prices, such as EUR.
        device_types: Your own device types by name. One with the name of a preset overrides it, or
            only the figures that it gives, such as ``reserved_gib``.
        devices: Single devices.
        nodes: Machines of several equal devices.
        switches: Names of switches, which only forward.
        link_types: Your own link types by name; they override presets of the same name.
        links: Links between devices, switches and nodes.
        hosts: Devices that slow each other, host by host.
        unusual_figures: Accept figures of devices and links outside the ranges of real ones, which
            are refused otherwise, since their unit is likely wrong.
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
    hosts: tuple[Host, ...] = ()
    unusual_figures: bool = False

    @classmethod
    def load(cls, path: str | Path) -> ClusterFile:
        """Read a cluster file: TOML as people write it, or JSON as in a plan.

        Raises:
            PipeplanError: naming every wrong field, and every figure that no real device or link
                has.
        """
        found = cls.from_data(read_toml_or_json(path), str(path))
        if not found.unusual_figures:
            require_usual(found.device_types, found._link_figures(), str(path))
            for doubt in found._doubtful_networks():
                logger.warning("%s: %s", path, doubt)
        return found

    @classmethod
    def from_data(cls, data: Any, source: str) -> ClusterFile:
        """Check plain data of a cluster file, such as JSON or TOML read into dicts and lists.

        Args:
            data: content of the file.
            source: its name in messages.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls.parse(_with_presets(check_format(data, FORMAT, source)), source)

    def _doubtful_networks(self) -> Iterator[str]:
        """Yield bandwidths between machines that are Gbit/s of network cards, in fields of GB/s."""
        for position, entry in enumerate(self.links):
            inside = {end.partition("/")[0] for end in entry.between if "/" in end}
            place, own, source = f"links[{position}]", entry.bandwidth_gb_per_s, entry.source
            if own is None and entry.preset in self.link_types:
                kind = self.link_types[entry.preset]
                place, own = f'link_types."{entry.preset}"', kind.bandwidth_gb_per_s
                source = kind.source if "source" in kind.model_fields_set else None
            is_inside = len(inside) == 1 and all("/" in end for end in entry.between)
            if own in CARDS_GBIT_PER_S and source in (None, "assumed") and not is_inside:
                yield (
                    f"{place}.bandwidth_gb_per_s: {own:g} between {entry.between[0]!r} and "
                    f"{entry.between[1]!r} is {8 * own:g} Gbit/s; if a network of {own:g} Gbit/s "
                    f"is meant, write {own / 8:g}; else write its source, or {OVERRIDE} = true"
                )

    def _link_figures(self) -> dict[str, LinkType]:
        """Return links with figures of their own, and types of links, by their place."""
        own = {
            f"links[{position}]": LinkType.model_construct(
                bandwidth_gb_per_s=entry.bandwidth_gb_per_s, latency_us=entry.latency_us
            )
            for position, entry in enumerate(self.links)
        }
        inner = {
            f"nodes[{position}].link": node.link
            for position, node in enumerate(self.nodes)
            if isinstance(node.link, LinkType)
        }
        types = {f'link_types."{name}"': kind for name, kind in self.link_types.items()}
        return {**types, **inner, **own}

    def expanded(self, source: str) -> dict[str, Any]:
        """Return the data of a Cluster, with every device, switch and link written out.

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
        for note in self._links_against_presets():
            logger.warning("%s: %s", source, note)
        return {
            "format": self.format,
            "name": self.name,
            "currency": self.currency,
            "device_types": types,
            "devices": devices,
            "switches": [*self.switches, *(node.name for node in self.nodes)],
            "links": links,
            "hosts": [
                *(host.model_dump() for host in self.hosts),
                *(node.host for node in self.nodes if node.slowdown is not None),
            ],
        }

    def _device_type(self, name: str, problems: list[str]) -> dict[str, Any]:
        known = {**DEVICES, **self.device_types}
        if name not in known:
            problems.append(
                f'device type {name!r} is unknown; define [device_types."{name}"], or '
                + near(name, sorted(known))
            )
            return {}
        return known[name].model_dump()

    def _link_type(self, name: str, field: str, problems: list[str]) -> dict[str, Any]:
        known = {**LINKS, **self.link_types}
        if name not in known:
            problems.append(
                f'{field}: link preset {name!r} is unknown; define [link_types."{name}"], or '
                + near(name, sorted(known))
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

    def _links_against_presets(self) -> Iterator[str]:
        """Yield measured bandwidths that contradict the preset of their link."""
        known = {**LINKS, **self.link_types}
        for position, entry in enumerate(self.links):
            width = entry.bandwidth_gb_per_s
            if entry.preset is None or width is None or entry.source != "measured":
                continue
            preset = known[entry.preset]
            usual = preset.bandwidth_gb_per_s
            if preset.source != "assumed" and contradict(usual, width):
                yield (
                    f"links[{position}]: {width:.4g} GB/s were measured between "
                    f"{entry.between[0]!r} and {entry.between[1]!r}, and {entry.preset} has "
                    f"{usual:.4g}: the messages went another way, or the preset is wrong; measure "
                    "again, or correct preset"
                )


def cluster_toml(cluster: Cluster) -> str:
    """Return a cluster as a TOML file, all written out; reading it gives an equal cluster.

    TOML 1.0 (https://toml.io/en/v1.0.0).
    """
    lines = [
        f"format = {_value(cluster.format)}",
        f"name = {_value(cluster.name)}",
        *([f"{OVERRIDE} = true"] if _has_unusual_figures(cluster) else []),
        *([] if cluster.currency is None else [f"currency = {_value(cluster.currency)}"]),
        f"switches = {_value(list(cluster.switches))}",
    ]
    for name, kind in cluster.device_types.items():
        lines += ["", f"[device_types.{_value(name)}]", *_fields(kind.model_dump())]
    for device in cluster.devices:
        lines += ["", "[[devices]]", *_fields(device.model_dump())]
    for link in cluster.links:
        data = link.model_dump()
        lines += ["", "[[links]]", *_fields({"between": data.pop("between"), **data})]
    for host in cluster.hosts:
        lines += ["", "[[hosts]]", *_fields(host.model_dump())]
    return "\n".join(lines) + "\n"


def cluster_json(cluster: Cluster) -> str:
    """Return a cluster as JSON, all written out; reading it gives an equal cluster."""
    text = cluster.model_dump_json(indent=1)
    if _has_unusual_figures(cluster):
        text = text.replace("{", f'{{\n "{OVERRIDE}": true,', 1)
    return f"{text}\n"


def _has_unusual_figures(cluster: Cluster) -> bool:
    links: dict[str, LinkType] = {
        f"links[{position}]": link for position, link in enumerate(cluster.links)
    }
    return any(unusual_figures(cluster.device_types, links))


def _fields(data: dict[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in data.items()]


def _value(value: Any) -> str:
    """Write a value; strings, numbers, booleans and lists are alike in TOML and JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_value(k)} = {_value(v)}" for k, v in value.items()) + " }"
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    # The one control character that JSON leaves as it is and TOML does not allow.
    return text.replace("\x7f", "\\u007f")
