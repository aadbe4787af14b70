"""A machine's cluster from ``nvidia-smi topo -m``, with assumed figures.

The table has a row and a column for every GPU and network card, and a class where they meet. A
class names a kind of connection without figures, so every link of the cluster is assumed: NVLink by
the number of bonded links, anything else as PCIe (:mod:`planner.interop.importing.pcie`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from planner.cluster.device_types import KnownType
from planner.cluster.hardware import LinkType
from planner.cluster.ports import FABRIC_LINKS, Ports
from planner.errors import PipeplanError, shorten
from planner.interop.importing.imported import ImportedCluster, ImportOptions, Wire
from planner.interop.importing.pcie import (
    CLASSES,
    Pair,
    PcieMachine,
    assumed,
    gpu_types,
    imported_machine,
    notes_on_ports,
    pcie_tree,
    ports_of,
)
from planner.records.document import read_text

_STYLES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV([1-9]|[12]\d|3[0-6])")  # No GPU has more than 18 yet.
_NAMED = re.compile(r"^\s*GPU (\d+): (.+?) \(UUID: ")
"""A line of ``nvidia-smi -L``, which may stand in the same file."""
_CARD = re.compile(r"^\s*(NIC\d+): (\S+)\s*$")
"""A line of the legend of network cards."""
OLDER_NAMES = {"SOC": "SYS"}
"""Names that drivers before 2018 print."""
NVSWITCH = "nvswitch"
OTHER_FABRIC = "NVLink3"
"""Assumed for GPUs whose NVLinks are not known."""


@dataclass(frozen=True)
class NvidiaTopology:
    """The table.

    Attributes:
        gpus: names of GPUs, such as ``gpu0``, in the order of rows.
        cards: names of network cards: those of the legend, else of the columns.
        classes: ``NV`` and a count, or one of :data:`CLASSES`, by two names in that order.
        numa: node of each GPU where it is told.
        names: what the driver calls each GPU, if ``nvidia-smi -L`` stands in the same file.
        notes: what could not be read.
    """

    gpus: tuple[str, ...]
    cards: tuple[str, ...]
    classes: Mapping[Pair, str]
    numa: Mapping[str, str]
    names: Mapping[str, str]
    notes: tuple[str, ...]


def looks_like_topology(head: str) -> bool:
    """Return whether such a table is at or near the beginning of a file."""
    return any(_is_header(_words(line)) for line in head.splitlines())


def read_topology(path: Path) -> NvidiaTopology:
    """Read the table.

    Raises:
        PipeplanError: naming the line, if there is no such table or it is cut off.
    """
    lines = [_STYLES.sub("", line) for line in read_text(path).splitlines()]
    start = next((n for n, line in enumerate(lines) if _is_header(_words(line))), None)
    if start is None:
        raise PipeplanError(
            f"{path}: has no table of `nvidia-smi topo -m`, whose first line names GPU0, GPU1, …"
        )
    columns = _columns(_words(lines[start]))
    rows = dict(_rows(path, lines, start + 1, columns))
    missing = [name for name in columns if name not in rows]
    if missing:
        raise PipeplanError(
            f"{path}: the table has no row of {', '.join(missing)}; it may be cut off"
        )
    known = _known_names(lines, columns)
    gpus = tuple(known[name] for name in columns if _GPU.fullmatch(name))
    if len(gpus) < 2 and len(gpus) == len(columns):
        raise PipeplanError(f"{path}: the table has one GPU; links join two or more")
    notes: list[str] = []
    classes = {
        (known[a], known[b]): found
        for a, b in combinations(sorted(columns, key=lambda name: known[name] not in gpus), 2)
        if (found := _class(columns, rows, (a, b), notes)) is not None
    }
    numa = {
        known[name]: row[len(columns) + 1]
        for name, row in rows.items()
        if known[name] in gpus and _has_numa(row, columns)
    }
    cards = tuple(name for name in known.values() if name not in gpus)
    return NvidiaTopology(gpus, cards, classes, numa, _called(lines), tuple(notes))


def _words(line: str) -> list[str]:
    return _STYLES.sub("", line).split()


def _is_header(words: Sequence[str]) -> bool:
    if words[:1] != ["GPU0"] or len(words) < 2:
        return False
    return _GPU.fullmatch(words[1]) is not None or "Affinity" in words


def _columns(words: Sequence[str]) -> list[str]:
    """GPUs and network cards, without what follows: CPU Affinity, NUMA Affinity, GPU NUMA ID."""
    end = words.index("CPU") if "CPU" in words else len(words)
    return list(words[:end])


def _known_names(lines: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the names in the cluster by column: ``gpu0``, and cards as the legend calls them."""
    found = (_CARD.match(line) for line in lines)
    legend = {match[1]: match[2] for match in found if match is not None}
    return {name: legend.get(name, name if "_" in name else name.lower()) for name in columns}


def _rows(
    path: Path, lines: Sequence[str], start: int, columns: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(lines[start:], start + 1):
        words = line.split()
        if not words or words[0] not in columns:
            continue
        if len(words) <= len(columns):
            raise PipeplanError(
                f"{path}: line {number}: {words[0]} has {len(words) - 1} entries for "
                f"{len(columns)} columns; it may be cut off"
            )
        yield words[0], words[1:]


def _class(
    columns: Sequence[str], rows: Mapping[str, list[str]], pair: Pair, notes: list[str]
) -> str | None:
    first, second = pair
    there, back = (
        OLDER_NAMES.get(word, word)
        for word in (rows[first][columns.index(second)], rows[second][columns.index(first)])
    )
    known = [word for word in (there, back) if word in CLASSES or _NVLINK.fullmatch(word)]
    if not known:
        notes.append(
            f"{first} and {second}: {shorten(there)} is none of NV#, {', '.join(CLASSES)}; "
            "they are joined by what joins the others"
        )
        return None
    if there != back:
        notes.append(
            f"{first} and {second}: {there} one way and {back} the other; taken as {known[0]}"
        )
    return known[0]


def _has_numa(row: Sequence[str], columns: Sequence[str]) -> bool:
    return len(row) > len(columns) + 1 and row[len(columns) + 1].isdecimal()


def _called(lines: Sequence[str]) -> dict[str, str]:
    found = (_NAMED.match(line) for line in lines)
    return {f"gpu{int(match[1])}": match[2] for match in found if match is not None}


def nvlinks(word: str) -> int:
    """Return how many NVLinks a class bonds; 0 for other classes."""
    found = _NVLINK.fullmatch(word)
    return int(found[1]) if found else 0


def read_topology_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each
    has more of them than a device has. All else is a tree of PCIe switches, NUMA nodes and what
    joins sockets. Network cards are switches in it, to which links to other machines are added.

    Args:
        path: of the file.
        options: the GPUs' type, if the file does not name them as ``nvidia-smi -L`` does, and
            :data:`GIVEN_PORTS`.

    Raises:
        PipeplanError: if there is no whole table, or the GPUs' type is not known.
    """
    topology = read_topology(path)
    types = gpu_types(path, topology.gpus, topology.names, options, "the lines of `nvidia-smi -L`")
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    wires = _wires(topology, ports)
    notes = (*topology.notes, *_notes(topology, types, options))
    return imported_machine(path.stem, types, wires, notes)


def _wires(topology: NvidiaTopology, ports: Mapping[str, Ports]) -> list[Wire]:
    counts = {pair: count for pair, word in topology.classes.items() if (count := nvlinks(word))}
    wires = list(_nvlink_wires(topology, ports, counts))
    if topology.cards or len(counts) < len(list(combinations(topology.gpus, 2))):
        over_pcie = {pair: word for pair, word in topology.classes.items() if pair not in counts}
        wires += pcie_tree(PcieMachine(ports, topology.cards, over_pcie, topology.numa))
    return wires


def _nvlink_wires(
    topology: NvidiaTopology, ports: Mapping[str, Ports], counts: Mapping[Pair, int]
) -> Iterator[Wire]:
    own = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in topology.gpus}
    if all(sum(own[gpu]) > FABRIC_LINKS[_fabric(ports[gpu])] for gpu in topology.gpus):
        for gpu in topology.gpus:
            yield Wire((gpu, NVSWITCH), _nvlink(ports[gpu], max(own[gpu])))
        return
    for (a, b), count in counts.items():
        yield Wire((a, b), _nvlink(ports[a], count))


def _nvlink(ports: Ports, count: int) -> LinkType:
    return assumed(_fabric(ports), count / FABRIC_LINKS[_fabric(ports)])


def _fabric(ports: Ports) -> str:
    return ports.fabric or OTHER_FABRIC


def _notes(
    topology: NvidiaTopology, types: Mapping[str, KnownType], options: ImportOptions
) -> Iterator[str]:
    has_nvlinks = any(nvlinks(word) for word in topology.classes.values())
    yield from notes_on_ports(types.values(), options, OTHER_FABRIC if has_nvlinks else None)
    if topology.cards:
        cards = f"{', '.join(topology.cards[:4])}{' and more' if len(topology.cards) > 4 else ''}"
        yield f"`pipeplan cluster merge` joins this box to others by its network cards ({cards})"
