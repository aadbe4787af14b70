"""A machine's cluster from the XML topology that NCCL or RCCL found (``NCCL_TOPO_DUMP_FILE``).

The file is the PCIe tree: NUMA nodes with PCI devices below them, of which some are bridges, GPUs
or network cards. It has the line rate of each PCIe link and the NVLinks or xGMI links of each GPU.
A dump with several hosts is of a rack whose NVSwitches join them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from planner.cluster.device_types import KnownType
from planner.cluster.hardware import LinkType
from planner.cluster.ports import Ports
from planner.cluster.presets import DEVICE_ROWS, DEVICES, LINKS
from planner.errors import shorten
from planner.interop.machines import (
    ASSUMED_FIGURES,
    END_US,
    HOP_US,
    HOST_SHARE,
    NVSWITCH,
    SYS_SHARE,
    Capture,
    ImportedCluster,
    ImportOptions,
    Wire,
    alone_note,
    assumed,
    imported,
    join_sockets,
    notes_on_ports,
    nvlink,
    ports_of,
)
from planner.units import plural

_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?GT/s")
_SYSTEM = re.compile(r"<system\b[^>]*version=")
_TO_SWITCH, _TO_CPU = "0x068000", "0x068001"
"""PCI classes of an NVSwitch, and of a CPU with NVLinks."""
_LINKS = ("nvlink", "xgmi")
_MOST_GBIT = 10_000
_REMEDY = "run the job with NCCL_TOPO_DUMP_FILE=topo.xml and give that file"


def is_nccl_topology(head: str) -> bool:
    """Return whether a file begins as such a dump, or as another file of NCCL's in XML."""
    return _SYSTEM.search(head) is not None or "<graphs version=" in head


def read_nccl_topology(found: Capture, options: ImportOptions) -> ImportedCluster:
    """Read the file into a cluster.

    Args:
        found: the file.
        options: the GPUs' type, if the PCI devices do not tell it, and what is given of ports.

    Raises:
        PipeplanError: if it is not such a file, has fewer than two ends, or does not tell the type.
    """
    machine = _Machine(found, options)
    machine.read(_root(found))
    notes = (*machine.notes(), ASSUMED_FIGURES)
    return imported(found.path.stem, machine.types, machine.used_wires(), notes)


def _root(found: Capture) -> Element:
    text = "\n".join(found.lines)
    if "<!" in text.replace("<!--", ""):
        raise found.wrong(f"declares a document type or entities; {_REMEDY}")
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise found.wrong(f"is no whole XML ({error}); it may be cut off") from None
    if root.tag != "system":
        raise found.wrong(
            f"is <{shorten(root.tag)}>, expected <system>: NCCL_GRAPH_DUMP_FILE has rings and "
            f"trees, not links; {_REMEDY}"
        )
    return root


@dataclass
class _Gpu:
    """A GPU: its element, what it is, and its ports."""

    element: Element
    type: KnownType
    ports: Ports

    @property
    def links(self) -> list[Element]:
        """Its NVLinks and xGMI links."""
        return [link for tag in _LINKS for link in self.element.findall(tag)]


@dataclass
class _Machine:
    """What has been read so far.

    Attributes:
        file: for messages.
        options: what the file does not say.
        gpus: by name.
        by_address: the name of each GPU by the address of its PCI device.
        wires: the links.
        gbit: the line rate of each network card in Gbit/s; 0 where it is not known.
        unknown_speeds: PCI devices without a line rate.
        switches: PCI bridges that are switches.
    """

    file: Capture
    options: ImportOptions
    gpus: dict[str, _Gpu] = field(default_factory=dict)
    by_address: dict[str, str] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    gbit: dict[str, float] = field(default_factory=dict)
    unknown_speeds: int = 0
    switches: int = 0

    @property
    def types(self) -> dict[str, KnownType]:
        """The type of each GPU."""
        return {name: gpu.type for name, gpu in self.gpus.items()}

    def read(self, root: Element) -> None:
        """Read the NUMA nodes of all hosts, and what joins them.

        Raises:
            PipeplanError: if there is no GPU, or an element cannot be read.
        """
        cpus = root.findall("cpu")
        hosts = list(dict.fromkeys(cpu.get("host_hash", "") for cpu in cpus))
        tops: dict[str, list[str]] = {}
        for cpu in cpus:
            prefix = f"host{hosts.index(cpu.get('host_hash', ''))}/" if len(hosts) > 1 else ""
            top = f"{prefix}numa{cpu.get('numaid', '0').removeprefix('-')}"
            ends = [end for child in cpu for end in self._below(child, prefix)]
            self.wires += [Wire((end, top), kind) for end, kind in ends]
            if ends:
                tops.setdefault(prefix, []).append(top)
        if not self.gpus:
            raise self.file.wrong(
                "has no <gpu>; it may be the file of a provider that NCCL reads (NCCL_TOPO_FILE), "
                f"which has no NVLinks: {_REMEDY}"
            )
        kinds = [assumed(gpu.ports.pcie, SYS_SHARE, HOP_US) for gpu in self.gpus.values()]
        kind = max(kinds, key=lambda kind: kind.bandwidth_gb_per_s)
        for prefix, of_host in tops.items():
            self.wires += join_sockets(of_host, [kind] * len(of_host), f"{prefix}sockets")
        self.wires += self._fabric()

    def _below(self, element: Element, prefix: str) -> Iterator[tuple[str, LinkType]]:
        """Yield what hangs on a NUMA node or bridge by a child of it, with its link upwards."""
        if element.tag == "nic":
            for net in element.findall("net"):
                yield self._net(net, prefix), self._pcie(element)
        if element.tag != "pci":
            return
        gpus = [self._gpu(element, gpu, prefix) for gpu in element.findall("gpu")]
        link = self._pcie(element, self.gpus[gpus[0]].ports if gpus else None)
        for gpu in gpus:
            yield gpu, self._uplink(self.gpus[gpu], link)
        for net in element.findall("nic/net"):
            yield self._net(net, prefix), link
        ends = [end for child in element.findall("pci") for end in self._below(child, prefix)]
        if len(ends) == 1:
            end, kind = ends[0]
            width = min(kind.bandwidth_gb_per_s, link.bandwidth_gb_per_s)
            yield end, kind.model_copy(update={"bandwidth_gb_per_s": width})
        elif ends:
            switch = f"{prefix}pcie{self.switches}"
            self.switches += 1
            self.wires += [Wire((end, switch), kind) for end, kind in ends]
            yield switch, link

    def _gpu(self, pci: Element, gpu: Element, prefix: str) -> str:
        number = gpu.get("dev", "")
        name = f"{prefix}gpu{number}"
        if name in self.gpus:
            raise self.file.wrong(
                f"two GPUs are {name} (dev={shorten(number)}); dev numbers the GPUs of a host "
                "from 0"
            )
        kind = self.options.known_type or self._type_of(pci, name)
        self.gpus[name] = _Gpu(gpu, kind, ports_of(kind.name, self.options))
        self.by_address[pci.get("busid", "").lower()] = name
        return name

    def _type_of(self, pci: Element, name: str) -> KnownType:
        """Return the preset with the PCI device's number."""
        number = pci.get("device", "").lower()
        for preset, row in DEVICE_ROWS.items():
            if number in row.get("pci_devices", ()):
                return KnownType(preset, DEVICES[preset])
        raise self.file.wrong(
            f"{name}: PCI device {shorten(number)} is no preset; give --device-type NAME"
        )

    def _net(self, net: Element, prefix: str) -> str:
        name = f"{prefix}{net.get('name') or 'net' + net.get('dev', '')}"
        if name in self.gbit:
            name = f"{name}-{net.get('dev', len(self.gbit))}"
        speed = net.get("speed", "")
        # Some plugins state another unit.
        gbit = float(speed) / 1000 if speed.isdecimal() else 0.0
        self.gbit[name] = gbit if gbit <= _MOST_GBIT else 0.0
        return name

    def _pcie(self, pci: Element, ports: Ports | None = None) -> LinkType:
        """Return the PCIe link of a device by its lanes and their rate, or its GPU's preset."""
        speed, width = _SPEED.match(pci.get("link_speed", "")), pci.get("link_width", "")
        if speed is None or not width.isdecimal() or int(width) == 0:
            self.unknown_speeds += 1
            kind = assumed((ports or ports_of("", self.options)).pcie)
        else:
            rate = float(speed[1])
            # 8 of 10 bits carry data up to 5 GT/s, 128 of 130 up to 32, 242 bytes of 256 from 64.
            share = 0.8 if rate < 8 else 128 / 130 if rate < 64 else 242 / 256
            update = {"bandwidth_gb_per_s": rate * int(width) / 8 * share, "source": "assumed"}
            kind = LINKS["PCIe4-x16"].model_copy(update=update)
        return kind.model_copy(update={"latency_us": HOP_US if ports is None else END_US})

    def _uplink(self, gpu: _Gpu, link: LinkType) -> LinkType:
        """Return a GPU's link to its host: NVLink or C2C where it has them, else PCIe."""
        width = link.bandwidth_gb_per_s * (1.0 if gpu.ports.peer_to_peer else HOST_SHARE)
        for c2c in gpu.element.findall("c2c"):
            width = max(width, self._count(c2c, "bw") * self._count(c2c, "count") / 1000)
        for other in gpu.element.findall("nvlink"):
            if other.get("tclass") == _TO_CPU:
                count = self._count(other, "count")
                width = max(width, nvlink(gpu.ports, count).bandwidth_gb_per_s)
        return link.model_copy(update={"bandwidth_gb_per_s": width})

    def _count(self, element: Element, name: str) -> int:
        text = element.get(name, "")
        if not text.isdecimal() or not 0 < int(text) < 10**7:
            raise self.file.wrong(
                f"<{element.tag} {name}={shorten(text)}>: expected a count above 0"
            )
        return int(text)

    def _fabric(self) -> Iterator[Wire]:
        """Yield NVLinks and xGMI links: to a switch, or between two GPUs, which both list them."""
        order = {name: number for number, name in enumerate(self.gpus)}
        for name, gpu in self.gpus.items():
            switched = [link for link in gpu.links if link.get("tclass") == _TO_SWITCH]
            if switched:
                count = sum(self._count(link, "count") for link in switched)
                yield Wire((name, NVSWITCH), nvlink(gpu.ports, count))
            for link in gpu.links:
                other = self.by_address.get(link.get("target", "").lower())
                if other is not None and order[name] < order[other]:
                    yield Wire((name, other), nvlink(gpu.ports, self._count(link, "count")))

    def used_wires(self) -> list[Wire]:
        """Return the links without switches that lead nowhere, such as one GPU's NUMA node."""
        wires, kept = self.wires, {*self.gpus, *self.gbit}
        while True:
            uses = Counter(end for wire in wires for end in wire.between)
            loose = {end for end, count in uses.items() if count == 1 and end not in kept}
            if not loose:
                return wires
            wires = [wire for wire in wires if loose.isdisjoint(wire.between)]

    def notes(self) -> Iterator[str]:
        """Yield what had to be assumed, and by which cards the machine is joined to others."""
        yield from notes_on_ports(self.types.values(), self.options, None)
        if self.unknown_speeds:
            yield (
                f"{plural(self.unknown_speeds, 'PCI device')} without link_speed and link_width, "
                "as in virtual machines: assumed to be those of the GPU's type, or PCIe4-x16"
            )
        yield from alone_note(self.gpus, (name for name, gpu in self.gpus.items() if gpu.links))
        speeds: dict[float, list[str]] = {}
        for name, gbit in self.gbit.items():
            if gbit:
                speeds.setdefault(gbit, []).append(name)
        for gbit, names in speeds.items():
            shown = f"{', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
            yield f"`pipeplan import --network {gbit:g}gbit` joins this box to others by {shown}"
