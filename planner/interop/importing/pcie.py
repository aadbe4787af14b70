"""The PCIe tree of a machine as switches and links, with assumed figures.

GPUs and network cards hang on PCIe switches, these on the host bridges of a NUMA node, and NUMA
nodes on what joins sockets. Every switch has one link upwards, which all that hangs on it share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from networkx.utils import UnionFind

from planner.cluster.hardware import LinkType
from planner.cluster.ports import FABRIC_LINKS, Ports
from planner.cluster.presets import LINKS
from planner.interop.importing.imported import HOST_SHARE, Pair, Wire

NVSWITCH = "nvswitch"
OTHER_FABRIC = "NVLink3"
"""Assumed for each NVLink of GPUs whose NVLinks are not known."""
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""How two ends are joined, nearest first: by one PCIe switch, by several, by a host bridge, by the
host bridges of a NUMA node, by what joins NUMA nodes (legend of ``nvidia-smi topo -m``)."""
_LEVELS = (("pcie", CLASSES[:1]), ("bridges", CLASSES[:2]), ("numa", CLASSES[:4]))
"""What the switches of each level are called, and the classes that one of them joins."""
SYS_SHARE = 0.5
"""The share of PCIe's bandwidth between sockets. Machines differ widely: NCCL counts on 6 to 40
GB/s (Broadwell to the newest Xeons) and 16 to 32 (EPYC), src/graph/topo.h."""
END_US, HOP_US = 2.5, 0.5
"""Assumed latency of the link of a GPU, so that two on a switch have that of the PCIe presets, and
of every other link on the way."""


def assumed(preset: str, share: float = 1.0, latency_us: float | None = None) -> LinkType:
    """Return a link with a share of a preset's bandwidth, marked as assumed."""
    kind = LINKS[preset]
    update = {"bandwidth_gb_per_s": kind.bandwidth_gb_per_s * share, "source": "assumed"}
    return kind.model_copy(
        update=update if latency_us is None else {**update, "latency_us": latency_us}
    )


def nvlink(ports: Ports, count: int) -> LinkType:
    """Return a link of so many bonded NVLinks, or xGMI links, of a GPU."""
    fabric = ports.fabric or OTHER_FABRIC
    return assumed(fabric, count / FABRIC_LINKS[fabric])


def joined_groups(names: Sequence[str], pairs: Iterable[Pair]) -> list[list[str]]:
    """Return names in groups that pairs of them join, in their order."""
    joined = UnionFind(names)
    for a, b in pairs:
        joined.union(a, b)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(joined[name], []).append(name)
    return list(groups.values())


def join_sockets(tops: Sequence[str], kinds: Sequence[LinkType], switch: str) -> list[Wire]:
    """Return the links between NUMA nodes: of two directly, else by a switch.

    Args:
        tops: of the nodes.
        kinds: the link of each to others; two are joined by the narrower with one hop.
        switch: name of the switch.
    """
    if len(tops) != 2:
        rows = zip(tops, kinds, strict=True)
        return [Wire((top, switch), kind) for top, kind in rows] if len(tops) > 2 else []
    # The link of a GPU that is a node's top has the latency of its end.
    latency_us = HOP_US + sum(END_US for kind in kinds if kind.latency_us == END_US)
    kind = min(kinds, key=lambda kind: kind.bandwidth_gb_per_s)
    return [Wire((tops[0], tops[1]), kind.model_copy(update={"latency_us": latency_us}))]


@dataclass
class PcieTree:
    """The PCIe tree of the GPUs and network cards of one machine; every other end is a switch.

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
    _wires: list[Wire] = field(default_factory=list)
    _count: Counter[str] = field(default_factory=Counter)

    def wires(self) -> list[Wire]:
        """Return its links, level by level upwards."""
        parts: dict[str, tuple[str, ...]] = {name: (name,) for name in (*self.gpus, *self.cards)}
        for stem, classes in _LEVELS:
            pairs = [pair for pair, word in self.classes.items() if word in classes]
            pairs += self._on_one_node() if stem == "numa" else []
            top = {name: top for top, names in parts.items() for name in names}
            groups = joined_groups([*parts], [(top[a], top[b]) for a, b in pairs])
            parts = {
                self._under_switch(stem, group, parts): tuple(n for t in group for n in parts[t])
                for group in groups
            }
        kinds = [self._uplink(top, SYS_SHARE) for top in parts]
        return [*self._wires, *join_sockets([*parts], kinds, "sockets")]

    def _on_one_node(self) -> list[Pair]:
        """Return GPUs of one NUMA node whose class over PCIe is not known, as NVLink hides it."""
        return [
            (a, b)
            for a, b in combinations(self.gpus, 2)
            if (a, b) not in self.classes and a in self.numa and self.numa[a] == self.numa.get(b)
        ]

    def _under_switch(
        self, stem: str, tops: Sequence[str], parts: Mapping[str, tuple[str, ...]]
    ) -> str:
        if len(tops) == 1:
            return tops[0]
        switch = f"{stem}{self._count[stem]}"
        self._count[stem] += 1
        for near in self._with_cards(tops, parts):
            if len(near) == 1:
                self._wires.append(Wire((near[0], switch), self._uplink(near[0])))
                continue
            inner = f"{switch}-{self._cards_of(near, parts)[0]}"
            self._wires += [Wire((top, inner), self._uplink(top)) for top in near]
            free = assumed(self._host, latency_us=0.0).model_copy(update={"shared": True})
            self._wires.append(Wire((inner, switch), free))
        return switch

    def _with_cards(
        self, tops: Sequence[str], parts: Mapping[str, tuple[str, ...]]
    ) -> list[list[str]]:
        """Divide the GPUs that are equally near to several cards among these.

        A GPU and its card get a switch of their own, whose link upwards costs nothing: the route to
        the card is then shorter than those to the others.
        """
        groups = [[top] for top in tops if self._cards_of([top], parts)]
        if len(groups) < 2:
            return [[top] for top in tops]

        def gpu_count(group: Sequence[str]) -> int:
            return sum(name in self.gpus for top in group for name in parts[top])

        for top in tops:
            if not self._cards_of([top], parts):
                min(groups, key=gpu_count).append(top)
        return groups

    def _cards_of(self, tops: Sequence[str], parts: Mapping[str, tuple[str, ...]]) -> list[str]:
        return [name for top in tops for name in parts[top] if name not in self.gpus]

    @property
    def _host(self) -> str:
        kinds = (ports.pcie for ports in self.gpus.values())
        return max(kinds, key=lambda kind: LINKS[kind].bandwidth_gb_per_s)

    def _uplink(self, top: str, share: float = 1.0) -> LinkType:
        ports = self.gpus.get(top)
        if ports is None:
            return assumed(self._host, share, HOP_US)
        own = assumed(ports.pcie, 1.0 if ports.peer_to_peer else HOST_SHARE, END_US)
        across = assumed(self._host, share, END_US)
        return min(own, across, key=lambda kind: kind.bandwidth_gb_per_s)
