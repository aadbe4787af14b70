"""The PCIe tree of a machine as switches and links, with assumed figures.

GPUs and network cards hang on PCIe switches, these on the host bridges of a NUMA node, and NUMA
nodes on what joins sockets. Every switch has one link upwards, which all that hangs on it share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from networkx.utils import UnionFind

from planner.cluster.device_types import KnownType, named_type
from planner.cluster.hardware import LinkType
from planner.cluster.ports import OTHER_PORTS, PORTS, Ports
from planner.cluster.presets import LINKS
from planner.errors import PipeplanError
from planner.interop.importing.imported import ImportedCluster, ImportOptions, Wire, cluster_of

Pair = tuple[str, str]
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""How two ends are joined, nearest first: by one PCIe switch, by several, by a host bridge, by the
host bridges of a NUMA node, by what joins NUMA nodes (legend of ``nvidia-smi topo -m``)."""
_LEVELS = (("pcie", CLASSES[:1]), ("bridges", CLASSES[:2]), ("numa", CLASSES[:4]))
"""What the switches of each level are called, and the classes that one of them joins."""
SYS_SHARE = 0.5
"""The share of PCIe's bandwidth between sockets. Machines differ widely: NCCL counts on 6 to 40
GB/s (Broadwell to the newest Xeons) and 16 to 32 (EPYC), src/graph/topo.h."""
HOST_SHARE = 0.5
"""The share of PCIe's bandwidth between GPUs without peer-to-peer, whose messages are written to
host memory and read from there. Measured with PCIe 4: 13 GB/s each way between RTX 4090
(tinygrad/open-gpu-kernel-modules #6), 15 to 22 between other GPUs (NVIDIA/nccl #814)."""
END_US, HOP_US = 2.5, 0.5
"""Assumed latency of the link of a GPU, so that two on a switch have that of the PCIe presets, and
of every other link on the way."""


GIVEN_PORTS = ("pcie", "peer_to_peer")
"""What tables of connections do not say of the ports of GPUs, and the user may."""
_ASSUMED_FIGURES = (
    "the file has kinds of connections, no figures: bandwidths and latencies are presets and "
    "assumed; `torchrun -m executor.detect` measures them"
)


def gpu_types(
    path: Path,
    gpus: Iterable[str],
    called: Mapping[str, str],
    options: ImportOptions,
    names: str,
) -> dict[str, KnownType]:
    """Return the type of each GPU: the one that was given, or what the driver calls it.

    Args:
        path: of the file, for messages.
        gpus: by the names that they have in the cluster.
        called: what the driver calls them, where the file says so.
        options: with the type of all GPUs, if it was given.
        names: what the user may add to the file to name them.

    Raises:
        PipeplanError: if a type is not known.
    """
    if options.known_type is not None:
        return dict.fromkeys(gpus, options.known_type)
    types = {}
    for gpu in gpus:
        if gpu not in called:
            raise PipeplanError(
                f"{path}: does not say what {gpu.upper()} is; give --device-type NAME, or put "
                f"{names} into the file"
            )
        types[gpu] = named_type(called[gpu], f"{path}: {gpu.upper()}")
    return types


def ports_of(type_name: str, options: ImportOptions) -> Ports:
    """Return the ports of a device type, with what was given in place of what is known.

    Raises:
        PipeplanError: if a given value is none of those there are.
    """
    ports = PORTS.get(type_name, OTHER_PORTS)
    if "pcie" in options.given:
        ports = replace(ports, pcie=f"PCIe{options.choice('pcie', ('3', '4', '5'))}-x16")
    if "peer_to_peer" in options.given:
        has_it = options.choice("peer_to_peer", ("yes", "no")) == "yes"
        ports = replace(ports, peer_to_peer=has_it)
    return ports


def notes_on_ports(
    types: Iterable[KnownType], options: ImportOptions, fabric: str | None
) -> Iterator[str]:
    """Yield what is assumed of the ports of device types.

    Args:
        types: of the GPUs.
        options: with what was given.
        fabric: that is assumed where a type's is not known; None if no GPU has links of one.
    """
    for name, note in dict.fromkeys((kind.name, kind.note) for kind in types):
        if note is not None:
            yield note
        ports = ports_of(name, options)
        if fabric is not None and ports.fabric is None:
            yield f"{name}: a direct link to another GPU is assumed to be one of {fabric}"
        if name not in PORTS and "pcie" not in options.given:
            yield (
                f"{name}: its link to the host is assumed to be {ports.pcie}; "
                "--given pcie=3, 4 or 5 says otherwise"
            )
        if not ports.peer_to_peer:
            yield (
                f"{name}: no peer-to-peer over PCIe, so messages go through host memory, at "
                f"{HOST_SHARE:.0%} of PCIe's bandwidth; --given peer_to_peer=yes if your driver "
                "has it"
            )


@dataclass(frozen=True)
class PcieMachine:
    """The GPUs and network cards of one machine.

    Attributes:
        gpus: the ports of each GPU, by name.
        cards: names of network cards.
        classes: how two of them are joined over PCIe, where that is known; the names are in the
            order of ``gpus``, then ``cards``.
        numa: NUMA node of each GPU where it is known.
    """

    gpus: Mapping[str, Ports]
    cards: tuple[str, ...]
    classes: Mapping[Pair, str]
    numa: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, GPUs first."""
        return (*self.gpus, *self.cards)


def pcie_tree(machine: PcieMachine) -> list[Wire]:
    """Return the links of the PCIe tree; every end that is no GPU is a switch."""
    return _Tree(machine).wires()


def imported_machine(
    name: str, types: Mapping[str, KnownType], wires: Sequence[Wire], notes: Iterable[str]
) -> ImportedCluster:
    """Return the cluster of one machine, whose switches are the ends of links that are no GPUs."""
    ends = dict.fromkeys(end for wire in wires for end in wire.between)
    cluster = cluster_of(
        name,
        {gpu: kind.name for gpu, kind in types.items()},
        {kind.name: kind.figures for kind in types.values()},
        [end for end in ends if end not in types],
        wires,
    )
    return ImportedCluster(cluster, (*notes, _ASSUMED_FIGURES))


def assumed(preset: str, share: float = 1.0, latency_us: float | None = None) -> LinkType:
    """Return a link with a share of a preset's bandwidth, marked as assumed."""
    kind = LINKS[preset]
    return kind.model_copy(
        update={
            "bandwidth_gb_per_s": kind.bandwidth_gb_per_s * share,
            "latency_us": kind.latency_us if latency_us is None else latency_us,
            "source": "assumed",
        }
    )


@dataclass(frozen=True)
class _Part:
    """A part of the tree: its top, and the GPUs and cards below it."""

    top: str
    members: tuple[str, ...]


class _Tree:
    """The tree, level by level from GPUs and cards upwards."""

    def __init__(self, machine: PcieMachine) -> None:
        self._machine = machine
        kinds = [ports.pcie for ports in machine.gpus.values()]
        self._host = max(kinds, key=lambda kind: LINKS[kind].bandwidth_gb_per_s)
        self._wires: list[Wire] = []
        self._counts: Counter[str] = Counter()

    def wires(self) -> list[Wire]:
        parts = [_Part(name, (name,)) for name in self._machine.names]
        for stem, classes in _LEVELS:
            pairs = [pair for pair, word in self._machine.classes.items() if word in classes]
            pairs += self._on_one_node() if stem == "numa" else []
            parts = [self._under_switch(stem, group) for group in _joined(parts, pairs)]
        self._join_sockets(parts)
        return self._wires

    def _on_one_node(self) -> list[Pair]:
        """Return GPUs of one NUMA node whose class over PCIe is not known, as NVLink hides it."""
        numa = self._machine.numa
        return [
            (a, b)
            for a, b in combinations(self._machine.gpus, 2)
            if (a, b) not in self._machine.classes and a in numa and numa[a] == numa.get(b)
        ]

    def _under_switch(self, stem: str, parts: Sequence[_Part]) -> _Part:
        if len(parts) == 1:
            return parts[0]
        switch = f"{stem}{self._counts[stem]}"
        self._counts[stem] += 1
        for near in self._with_cards(parts):
            if len(near) == 1:
                self._wires.append(Wire((near[0].top, switch), self._uplink(near[0])))
                continue
            inner = f"{switch}-{self._cards(near)[0]}"
            self._wires += [Wire((part.top, inner), self._uplink(part)) for part in near]
            free = assumed(self._host, latency_us=0.0).model_copy(update={"shared": True})
            self._wires.append(Wire((inner, switch), free))
        return _Part(switch, tuple(name for part in parts for name in part.members))

    def _with_cards(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Divide the GPUs that are equally near to several cards among these.

        A GPU and its card get a switch of their own, whose link upwards costs nothing: the route to
        the card is then shorter than those to the others.
        """
        groups = [[part] for part in parts if self._cards([part])]
        others = [part for part in parts if not self._cards([part])]
        if len(groups) < 2:
            return [[part] for part in parts]
        for part in others:
            min(groups, key=self._gpu_count).append(part)
        return groups

    def _cards(self, parts: Sequence[_Part]) -> list[str]:
        cards = set(self._machine.cards)
        return [name for part in parts for name in part.members if name in cards]

    def _gpu_count(self, parts: Sequence[_Part]) -> int:
        return sum(len(part.members) for part in parts) - len(self._cards(parts))

    def _join_sockets(self, parts: Sequence[_Part]) -> None:
        if len(parts) == 2:
            ends_us = sum(END_US for part in parts if part.top in self._machine.gpus)
            narrow = min(
                (self._uplink(part, SYS_SHARE) for part in parts),
                key=lambda kind: kind.bandwidth_gb_per_s,
            )
            kind = narrow.model_copy(update={"latency_us": HOP_US + ends_us})
            self._wires.append(Wire((parts[0].top, parts[1].top), kind))
        elif len(parts) > 2:
            self._wires += [
                Wire((part.top, "sockets"), self._uplink(part, SYS_SHARE)) for part in parts
            ]

    def _uplink(self, part: _Part, share: float = 1.0) -> LinkType:
        ports = self._machine.gpus.get(part.top)
        if ports is None:
            return assumed(self._host, share, HOP_US)
        own = assumed(ports.pcie, 1.0 if ports.peer_to_peer else HOST_SHARE, END_US)
        across = assumed(self._host, share, END_US)
        return min(own, across, key=lambda kind: kind.bandwidth_gb_per_s)


def _joined(parts: Sequence[_Part], pairs: Iterable[Pair]) -> list[list[_Part]]:
    """Return the parts in groups that pairs of their members join, in their order."""
    joined = UnionFind([part.top for part in parts])
    top = {name: part.top for part in parts for name in part.members}
    for a, b in pairs:
        joined.union(top[a], top[b])
    groups: dict[str, list[_Part]] = {}
    for part in parts:
        groups.setdefault(joined[part.top], []).append(part)
    return list(groups.values())
