"""A machine's cluster from the XML topology that NCCL or RCCL found (``NCCL_TOPO_DUMP_FILE``).

The file is the PCIe tree: NUMA nodes with PCI devices below them, of which some are bridges, GPUs
or network cards. It has the line rate of each PCIe link and the NVLinks or xGMI links of each GPU.
A dump with several hosts is of a rack whose NVSwitches join them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from planner.cluster.device_types import KnownType
from planner.cluster.hardware import LinkType
from planner.cluster.ports import Ports
from planner.cluster.presets import DEVICE_ROWS, DEVICES, LINKS
from planner.errors import PipeplanError, shorten
from planner.interop.importing.captured import captured_lines
from planner.interop.importing.imported import (
    HOST_SHARE,
    ImportedCluster,
    ImportOptions,
    Wire,
    alone_note,
    imported_machine,
    notes_on_ports,
    ports_of,
)
from planner.interop.importing.pcie import (
    END_US,
    HOP_US,
    NVSWITCH,
    SYS_SHARE,
    assumed,
    join_sockets,
    nvlink,
)
from planner.units import plural

_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?GT/s")
_SYSTEM = re.compile(r"<system\b[^>]*version=")
_TO_SWITCH, _TO_CPU = "0x068000", "0x068001"
"""PCI classes of an NVSwitch, and of a CPU with NVLinks."""
_LINKS = ("nvlink", "xgmi")
_MOST_GBIT = 10_000
_REMEDY = "run the job with NCCL_TOPO_DUMP_FILE=topo.xml and give that file"


@dataclass
class _Machine:
    """What has been read so far; links by their two ends, GPUs by the address of their device."""

    path: Path
    options: ImportOptions
    types: dict[str, KnownType] = field(default_factory=dict)
    ports: dict[str, Ports] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    elements: dict[str, ElementTree.Element] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    nets: dict[str, float] = field(default_factory=dict)
    unknown_speeds: int = 0
    switches: int = 0


def looks_like_nccl_topology(head: str) -> bool:
    """Return whether a file begins as such a dump, or as another file of NCCL's in XML."""
    return _SYSTEM.search(head) is not None or "<graphs version=" in head


def read_nccl_topology(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the file into a cluster.

    Args:
        path: of the file.
        options: the GPUs' type, if the PCI devices do not tell it, and what is given of ports.

    Raises:
        PipeplanError: if it is not such a file, has fewer than two ends, or does not tell the type.
    """
    root = _root(path)
    machine = _Machine(path, options)
    cpus = root.findall("cpu")
    hosts = list(dict.fromkeys(cpu.get("host_hash", "") for cpu in cpus))
    tops = []
    for cpu in cpus:
        prefix = f"host{hosts.index(cpu.get('host_hash', ''))}/" if len(hosts) > 1 else ""
        top = f"{prefix}numa{cpu.get('numaid', '0').removeprefix('-')}"
        ends = [end for child in cpu for end in _below(machine, child, prefix)]
        for end, kind in ends:
            machine.wires.append(Wire((end, top), kind))
        if ends:
            tops.append(top)
    if not machine.types:
        raise PipeplanError(
            f"{path}: has no <gpu>; it may be the file of a provider that NCCL reads "
            f"(NCCL_TOPO_FILE), which has no NVLinks: {_REMEDY}"
        )
    machine.wires += [*_join_hosts(machine, tops), *_fabric(machine)]
    return imported_machine(path.stem, machine.types, _used(machine), tuple(_notes(machine)))


def _root(path: Path) -> ElementTree.Element:
    text = "\n".join(captured_lines(path))
    if "<!" in text.replace("<!--", ""):
        raise PipeplanError(f"{path}: declares a document type or entities; {_REMEDY}")
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise PipeplanError(f"{path}: is no whole XML ({error}); it may be cut off") from None
    if root.tag != "system":
        raise PipeplanError(
            f"{path}: is <{shorten(root.tag)}>, expected <system>: "
            f"NCCL_GRAPH_DUMP_FILE has rings and trees, not links; {_REMEDY}"
        )
    return root


def _below(
    machine: _Machine, element: ElementTree.Element, prefix: str
) -> Iterator[tuple[str, LinkType]]:
    """Yield what hangs on a NUMA node or bridge by a child of it, each with its link upwards."""
    if element.tag == "nic":
        for net in element.findall("net"):
            yield _net(machine, net, prefix), _pcie(machine, element)
    if element.tag != "pci":
        return
    gpus = [_gpu(machine, element, gpu, prefix) for gpu in element.findall("gpu")]
    link = _pcie(machine, element, machine.ports[gpus[0]] if gpus else None)
    for gpu in gpus:
        yield gpu, _uplink(machine, gpu, link)
    for nic in element.findall("nic"):
        for net in nic.findall("net"):
            yield _net(machine, net, prefix), link
    ends = [end for child in element.findall("pci") for end in _below(machine, child, prefix)]
    if len(ends) == 1:
        end, kind = ends[0]
        width = min(kind.bandwidth_gb_per_s, link.bandwidth_gb_per_s)
        yield end, kind.model_copy(update={"bandwidth_gb_per_s": width})
    elif ends:
        switch = f"{prefix}pcie{machine.switches}"
        machine.switches += 1
        machine.wires += [Wire((end, switch), kind) for end, kind in ends]
        yield switch, link


def _gpu(machine: _Machine, pci: ElementTree.Element, gpu: ElementTree.Element, prefix: str) -> str:
    name = f"{prefix}gpu{gpu.get('dev', '')}"
    if name in machine.types:
        raise PipeplanError(
            f"{machine.path}: two GPUs are {name} (dev={shorten(gpu.get('dev', ''))}); dev "
            "numbers the GPUs of a host from 0"
        )
    machine.types[name] = kind = machine.options.known_type or _type_of(machine, pci, name)
    machine.ports[name] = ports_of(kind.name, machine.options)
    machine.addresses[pci.get("busid", "").lower()] = name
    machine.elements[name] = gpu
    return name


def _type_of(machine: _Machine, pci: ElementTree.Element, name: str) -> KnownType:
    """Return the preset with the PCI device's number."""
    number = pci.get("device", "").lower()
    for preset, row in DEVICE_ROWS.items():
        if number in row.get("pci_devices", ()):
            return KnownType(preset, DEVICES[preset])
    raise PipeplanError(
        f"{machine.path}: {name}: PCI device {shorten(number)} is no preset; give --device-type "
        "NAME"
    )


def _net(machine: _Machine, net: ElementTree.Element, prefix: str) -> str:
    name = f"{prefix}{net.get('name') or 'net' + net.get('dev', '')}"
    if name in machine.nets:
        name = f"{name}-{net.get('dev', len(machine.nets))}"
    speed = net.get("speed", "")
    # Some plugins state another unit.
    gbit = float(speed) / 1000 if speed.isdecimal() else 0.0
    machine.nets[name] = gbit if gbit <= _MOST_GBIT else 0.0
    return name


def _pcie(machine: _Machine, pci: ElementTree.Element, ports: Ports | None = None) -> LinkType:
    """Return the PCIe link of a device by its lanes and their rate, or the preset of its GPU."""
    speed, width = _SPEED.match(pci.get("link_speed", "")), pci.get("link_width", "")
    if speed is None or not width.isdecimal() or int(width) == 0:
        machine.unknown_speeds += 1
        kind = assumed((ports or ports_of("", machine.options)).pcie)
    else:
        rate = float(speed[1])
        # 8 of 10 bits carry data up to 5 GT/s, 128 of 130 up to 32, 242 bytes of 256 from 64 on.
        share = 0.8 if rate < 8 else 128 / 130 if rate < 64 else 242 / 256
        update = {"bandwidth_gb_per_s": rate * int(width) / 8 * share, "source": "assumed"}
        kind = LINKS["PCIe4-x16"].model_copy(update=update)
    return kind.model_copy(update={"latency_us": HOP_US if ports is None else END_US})


def _uplink(machine: _Machine, name: str, link: LinkType) -> LinkType:
    """Return a GPU's link to its host: NVLink or C2C where it has them, else PCIe."""
    gpu = machine.elements[name]
    width = link.bandwidth_gb_per_s * (1.0 if machine.ports[name].peer_to_peer else HOST_SHARE)
    for c2c in gpu.findall("c2c"):
        width = max(width, _count(machine, c2c, "bw") * _count(machine, c2c, "count") / 1000)
    for other in gpu.findall("nvlink"):
        if other.get("tclass") == _TO_CPU:
            count = _count(machine, other, "count")
            width = max(width, nvlink(machine.ports[name], count).bandwidth_gb_per_s)
    return link.model_copy(update={"bandwidth_gb_per_s": width})


def _count(machine: _Machine, element: ElementTree.Element, name: str) -> int:
    text = element.get(name, "")
    if not text.isdecimal() or not 0 < int(text) < 10**7:
        raise PipeplanError(
            f"{machine.path}: <{element.tag} {name}={shorten(text)}>: expected a count above 0"
        )
    return int(text)


def _fabric(machine: _Machine) -> Iterator[Wire]:
    """Yield NVLinks and xGMI links: to a switch, or between two GPUs, which both list them."""
    order = {name: number for number, name in enumerate(machine.types)}
    for name, gpu in machine.elements.items():
        links = [link for tag in _LINKS for link in gpu.findall(tag)]
        ports = machine.ports[name]
        switched = [link for link in links if link.get("tclass") == _TO_SWITCH]
        if switched:
            count = sum(_count(machine, link, "count") for link in switched)
            yield Wire((name, NVSWITCH), nvlink(ports, count))
        for link in links:
            other = machine.addresses.get(link.get("target", "").lower())
            if other is not None and order[name] < order[other]:
                yield Wire((name, other), nvlink(ports, _count(machine, link, "count")))


def _join_hosts(machine: _Machine, tops: list[str]) -> Iterator[Wire]:
    """Yield what joins the NUMA nodes of each host."""
    by_host: dict[str, list[str]] = {}
    for top in tops:
        by_host.setdefault(top.rpartition("/")[0], []).append(top)
    kinds = [assumed(ports.pcie, SYS_SHARE, HOP_US) for ports in machine.ports.values()]
    kind = max(kinds, key=lambda kind: kind.bandwidth_gb_per_s)
    for host, ends in by_host.items():
        switch = f"{host}/sockets" if host else "sockets"
        yield from join_sockets(ends, [kind] * len(ends), switch)


def _used(machine: _Machine) -> list[Wire]:
    """Leave out switches with nothing behind them, such as the NUMA node of one GPU alone."""
    wires = machine.wires
    kept: set[str] = {*machine.types, *machine.nets}
    while True:
        ends = [end for wire in wires for end in wire.between]
        loose = {end for end in ends if ends.count(end) == 1 and end not in kept}
        if not loose:
            return wires
        wires = [wire for wire in wires if loose.isdisjoint(wire.between)]


def _notes(machine: _Machine) -> Iterator[str]:
    yield from notes_on_ports(machine.types.values(), machine.options, None)
    if machine.unknown_speeds:
        yield (
            f"{plural(machine.unknown_speeds, 'PCI device')} without link_speed and link_width, as "
            "in virtual machines: assumed to be those of the GPU's type, or PCIe4-x16"
        )
    linked = (
        name
        for name, gpu in machine.elements.items()
        if any(gpu.find(tag) is not None for tag in _LINKS)
    )
    yield from alone_note(machine.types, linked)
    speeds: dict[float, list[str]] = {}
    for name, speed in machine.nets.items():
        if speed:
            speeds.setdefault(speed, []).append(name)
    for speed, names in speeds.items():
        shown = f"{', '.join(names[:4])}{' and more' if len(names) > 4 else ''}"
        yield f"`pipeplan import --network {speed:g}gbit` joins this box to others by {shown}"
