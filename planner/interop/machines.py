"""Machines of which other tools tell: their files as lines, their links, what is assumed of them.

A file with kinds of connections alone gives a tree of PCIe switches with assumed figures. GPUs and
network cards hang on PCIe switches, these on the host bridges of a NUMA node, and NUMA nodes on
the link between sockets. Every switch has one link upwards, which all that hangs on it share.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path

from networkx.utils import UnionFind

from planner.cluster.cluster import Cluster
from planner.cluster.device_types import KnownType, device_type_named, named_type
from planner.cluster.hardware import LinkType
from planner.cluster.ports import FABRIC_LINKS, OTHER_PORTS, PORTS, Ports
from planner.cluster.presets import LINKS
from planner.errors import PipeplanError, shorten
from planner.records.document import read_text

Pair = tuple[str, str]


# --- files ----------------------------------------------------------------------------------------

_STYLES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_MESSAGES = ("log", "message", "msg", "textPayload")
"""Fields of the lines of Docker, Google Cloud and others."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How files begin that PowerShell's ``>`` writes."""


def plain_text(data: bytes) -> str:
    """Return the beginning of a file as text without styles of a terminal."""
    return _plain(data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8", errors="replace"))


def _plain(text: str) -> str:
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        text = "\n".join(map(_message, text.splitlines()))
    # Web pages have spaces that do not break.
    return _STYLES.sub("", text).replace("\xa0", " ")


def _message(line: str) -> str:
    """Return what was printed, of a line that a container's log driver keeps as JSON."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return line
    found = (data.get(name) for name in _MESSAGES) if isinstance(data, dict) else ()
    return next((text.rstrip("\n") for text in found if isinstance(text, str)), line)


@dataclass(frozen=True)
class Capture:
    """The output of another tool as it was captured: styled, in JSON lines, with any line ends.

    Attributes:
        path: of the file.
        lines: as the tool printed them.
    """

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, data: bytes) -> Capture:
        """Return the lines of a file.

        Args:
            path: of the file.
            data: its contents.

        Raises:
            PipeplanError: if it is not text.
        """
        try:
            text = data.decode("utf-16") if data.startswith(_UTF_16) else read_text(path)
        except UnicodeError as error:
            raise PipeplanError(f"{path}: cannot be read: {error}") from None
        return cls(path, tuple(_plain(text).splitlines()))

    def wrong(self, problem: str, line: int | None = None) -> PipeplanError:
        """Return the error for a problem of the file, at a line if it is of one, from 1."""
        return PipeplanError(f"{self.path}: {'' if line is None else f'line {line}: '}{problem}")


@dataclass(frozen=True)
class ImportOptions:
    """What a file does not say.

    Attributes:
        device_type: of all GPUs: a preset, or ``FILE.toml:NAME`` of one's own; None: not given.
        given: further values by name, of which each format takes some.
    """

    device_type: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def known_type(self) -> KnownType | None:
        """The device type that was given, with its figures; None if none was."""
        return None if self.device_type is None else device_type_named(self.device_type)

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Return a value that was given, which has to be one of a few; None if it was not.

        Raises:
            PipeplanError: if it is none of them.
        """
        value = self.given.get(name)
        if value not in (None, *choices):
            raise PipeplanError(
                f"--given {name}={shorten(value)}: expected one of {', '.join(choices)}"
            )
        return value


@dataclass(frozen=True)
class ImportedCluster:
    """A file of another tool as a cluster.

    Attributes:
        cluster: devices and links.
        notes: what could not be read or had to be assumed, one line each, for the user.
    """

    cluster: Cluster
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Wire:
    """A link to be: its ends and its figures."""

    between: Pair
    kind: LinkType


def imported(
    name: str, types: Mapping[str, KnownType], wires: Sequence[Wire], notes: Iterable[str]
) -> ImportedCluster:
    """Return a cluster of devices by name; the ends of links that are no devices are switches."""
    ends = dict.fromkeys(end for wire in wires for end in wire.between)
    data = {
        "format": "pipeplan-cluster/1",
        "name": name,
        "device_types": {kind.name: kind.figures.model_dump() for kind in types.values()},
        "devices": [{"name": device, "type": kind.name} for device, kind in types.items()],
        "switches": [end for end in ends if end not in types],
        "links": [{"between": list(wire.between), **wire.kind.model_dump()} for wire in wires],
    }
    return ImportedCluster(Cluster.parse(data, name), tuple(notes))


# --- types and ports of GPUs ----------------------------------------------------------------------

GIVEN_PORTS = ("pcie", "peer_to_peer")
"""What tables of connections do not say of the ports of GPUs, and the user may."""
HOST_SHARE = 0.5
"""The share of PCIe's bandwidth between GPUs without peer-to-peer, whose messages are written to
host memory and read from there. Measured with PCIe 4: 13 GB/s each way between RTX 4090
(tinygrad/open-gpu-kernel-modules #6), 15 to 22 between other GPUs (NVIDIA/nccl #814)."""
ASSUMED_FIGURES = (
    "the file has kinds of connections, no figures: bandwidths and latencies are presets and "
    "assumed; `torchrun -m executor.detect` measures them"
)


def gpu_types(
    found: Capture,
    gpus: Iterable[str],
    called: Mapping[str, str],
    options: ImportOptions,
    names: str,
) -> dict[str, KnownType]:
    """Return the type of each GPU: the one that was given, or what the driver calls it.

    Args:
        found: the file, for messages.
        gpus: by the names that they have in the cluster.
        called: what the driver calls them, where the file says so.
        options: with the type of all GPUs, if it was given.
        names: what the user may add to the file to name them.

    Raises:
        PipeplanError: if a type is not known.
    """
    types = {}
    for gpu in gpus:
        if options.known_type is None and gpu not in called:
            raise found.wrong(
                f"does not say what {gpu.upper()} is; give --device-type NAME, or put {names} into "
                "the file"
            )
        types[gpu] = options.known_type or named_type(called[gpu], f"{found.path}: {gpu.upper()}")
    return types


def ports_of(type_name: str, options: ImportOptions) -> Ports:
    """Return the ports of a device type, with what was given in place of what is known.

    Raises:
        PipeplanError: if a given value is none of those there are.
    """
    ports = PORTS.get(type_name, OTHER_PORTS)
    if (pcie := options.choice("pcie", ("3", "4", "5"))) is not None:
        ports = replace(ports, pcie=f"PCIe{pcie}-x16")
    if (has_it := options.choice("peer_to_peer", ("yes", "no"))) is not None:
        ports = replace(ports, peer_to_peer=has_it == "yes")
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


def alone_note(gpus: Iterable[str], joined: Iterable[str]) -> Iterator[str]:
    """Yield a note on GPUs without NVLinks beside others that have them."""
    having = set(joined)
    if having and (alone := [gpu for gpu in gpus if gpu not in having]):
        yield (
            f"{', '.join(alone)}: no NVLinks, unlike the other GPUs, so messages go over PCIe; "
            "`nvidia-smi nvlink -s` shows whether they are inactive"
        )


# --- links whose figures are assumed --------------------------------------------------------------

NVSWITCH = "nvswitch"
OTHER_NVLINK = "NVLink3"
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
    fabric = ports.fabric or OTHER_NVLINK
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


class PcieTree:
    """The PCIe tree of one machine; every end that is no GPU or network card is a switch.

    Args:
        gpus: the ports of each GPU, by name.
        cards: names of network cards.
        classes: how two of them are joined over PCIe, where that is known; the names are in the
            order of ``gpus``, then ``cards``.
        numa: NUMA node of each GPU where it is known.
    """

    def __init__(
        self,
        gpus: Mapping[str, Ports],
        cards: Sequence[str],
        classes: Mapping[Pair, str],
        numa: Mapping[str, str],
    ) -> None:
        self._gpus = gpus
        self._host = max(
            (ports.pcie for ports in gpus.values()), key=lambda kind: LINKS[kind].bandwidth_gb_per_s
        )
        self._count = Counter[str]()
        self.wires: list[Wire] = []
        """The links, level by level upwards."""
        # GPUs of one NUMA node whose class over PCIe is not known, as NVLink hides it.
        on_one_node = [
            (a, b)
            for a, b in combinations(gpus, 2)
            if (a, b) not in classes and a in numa and numa[a] == numa.get(b)
        ]
        below: dict[str, tuple[str, ...]] = {name: (name,) for name in (*gpus, *cards)}
        for stem, joining in _LEVELS:
            pairs = [pair for pair, word in classes.items() if word in joining]
            pairs += on_one_node if stem == "numa" else []
            top = {name: top for top, names in below.items() for name in names}
            groups = joined_groups([*below], [(top[a], top[b]) for a, b in pairs])
            below = {
                self._under_switch(stem, group, below): tuple(n for t in group for n in below[t])
                for group in groups
            }
        kinds = [self._uplink(top, SYS_SHARE) for top in below]
        self.wires += join_sockets([*below], kinds, "sockets")

    def _under_switch(
        self, stem: str, tops: Sequence[str], below: Mapping[str, tuple[str, ...]]
    ) -> str:
        """Join tops by a switch, unless there is one; return its name.

        GPUs that are equally near to several cards are divided among these. A GPU and its card get
        a switch of their own, whose link upwards costs nothing: the route to the card is then
        shorter than those to the others.
        """
        if len(tops) == 1:
            return tops[0]
        switch = f"{stem}{self._count[stem]}"
        self._count[stem] += 1
        cards = {top: [n for n in below[top] if n not in self._gpus] for top in tops}
        groups = [[top] for top in tops if cards[top]]
        if len(groups) < 2:
            groups = [[top] for top in tops]
        else:
            for top in tops:
                if not cards[top]:
                    # The card with the fewest GPUs.
                    fewest = min(
                        groups, key=lambda row: sum(len(below[t]) - len(cards[t]) for t in row)
                    )
                    fewest.append(top)
        for near in groups:
            if len(near) == 1:
                self.wires.append(Wire((near[0], switch), self._uplink(near[0])))
                continue
            inner = f"{switch}-{next(card for top in near for card in cards[top])}"
            self.wires += [Wire((top, inner), self._uplink(top)) for top in near]
            free = assumed(self._host, latency_us=0.0).model_copy(update={"shared": True})
            self.wires.append(Wire((inner, switch), free))
        return switch

    def _uplink(self, top: str, share: float = 1.0) -> LinkType:
        ports = self._gpus.get(top)
        if ports is None:
            return assumed(self._host, share, HOP_US)
        own = assumed(ports.pcie, 1.0 if ports.peer_to_peer else HOST_SHARE, END_US)
        across = assumed(self._host, share, END_US)
        return min(own, across, key=lambda kind: kind.bandwidth_gb_per_s)
