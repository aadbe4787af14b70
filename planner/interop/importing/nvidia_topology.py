"""A machine's cluster from ``nvidia-smi topo -m``, with assumed figures.

The table has a row and a column for every GPU and network card, and a class where they meet. A
class names a kind of connection without figures, so every link of the cluster is assumed: NVLink by
the number of bonded links, anything else as PCIe (:data:`_CLASSES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from networkx.utils import UnionFind

from planner.cluster.device_types import KnownType, named_type
from planner.cluster.hardware import LinkType
from planner.cluster.presets import DEVICES, LINKS
from planner.errors import PipeplanError, shorten
from planner.interop.importing.imported import ImportedCluster, Wire, cluster_of
from planner.records.document import read_text

_STYLES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV([1-9]|[12]\d|3[0-6])")  # No GPU has more than 18 yet.
_NAMED = re.compile(r"^\s*GPU (\d+): (.+?) \(UUID: ")
"""A line of ``nvidia-smi -L``, which may stand in the same file."""
OLDER_NAMES = {"SOC": "SYS"}
"""Names that drivers before 2018 print."""
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first; ``NV#`` besides."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class NvidiaTopology:
    """The table.

    Attributes:
        gpus: numbers, in the order of rows.
        classes: ``NV`` and a count, or one of :data:`CLASSES`, by two numbers in that order.
        numa: node of each GPU where it is told.
        names: of GPUs, if ``nvidia-smi -L`` stands in the same file.
        notes: what could not be read.
    """

    gpus: tuple[int, ...]
    classes: dict[Pair, str]
    numa: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    gpus = tuple(int(_number(name)) for name in columns if _GPU.fullmatch(name))
    missing = [f"GPU{gpu}" for gpu in gpus if gpu not in rows]
    if missing:
        raise PipeplanError(
            f"{path}: the table has no row of {', '.join(missing)}; it may be cut off"
        )
    if len(gpus) < 2:
        raise PipeplanError(f"{path}: the table has one GPU; links join two or more")
    notes: list[str] = []
    cells = {gpu: dict(zip(columns, rows[gpu], strict=False)) for gpu in gpus}
    classes = {
        pair: found
        for pair in combinations(gpus, 2)
        if (found := _class(pair, cells, notes)) is not None
    }
    cards = [name for name in columns if not _GPU.fullmatch(name)]
    if cards:
        notes.append(
            f"{', '.join(cards[:4])}{' and more' if len(cards) > 4 else ''} connect to other "
            "machines, which are not in the table: add their [[links]] yourself"
        )
    numa = {gpu: row[len(columns) + 1] for gpu, row in rows.items() if _has_numa(row, columns)}
    return NvidiaTopology(gpus, classes, numa, _names(lines), tuple(notes))


def _words(line: str) -> list[str]:
    return _STYLES.sub("", line).split()


def _is_header(words: Sequence[str]) -> bool:
    if words[:1] != ["GPU0"] or len(words) < 2:
        return False
    return _GPU.fullmatch(words[1]) is not None or words[1:3] == ["CPU", "Affinity"]


def _columns(words: Sequence[str]) -> list[str]:
    """GPUs and network cards, without what follows: CPU Affinity, NUMA Affinity, GPU NUMA ID."""
    end = words.index("CPU") if "CPU" in words else len(words)
    return list(words[:end])


def _number(name: str) -> str:
    found = _GPU.fullmatch(name)
    assert found is not None
    return found[1]


def _rows(
    path: Path, lines: Sequence[str], start: int, columns: Sequence[str]
) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines[start:], start + 1):
        words = line.split()
        if not words or not _GPU.fullmatch(words[0]):
            continue
        if len(words) <= len(columns):
            raise PipeplanError(
                f"{path}: line {number}: {words[0]} has {len(words) - 1} entries for "
                f"{len(columns)} columns; it may be cut off"
            )
        yield int(_number(words[0])), words[1:]


def _class(pair: Pair, cells: dict[int, dict[str, str]], notes: list[str]) -> str | None:
    first, second = pair
    there, back = (
        OLDER_NAMES.get(word, word)
        for word in (cells[first][f"GPU{second}"], cells[second][f"GPU{first}"])
    )
    known = [word for word in (there, back) if word in CLASSES or _NVLINK.fullmatch(word)]
    if not known:
        notes.append(
            f"GPU{first} and GPU{second}: {shorten(there)} is none of NV#, {', '.join(CLASSES)}; "
            "they are joined by what joins the others"
        )
        return None
    if there != back:
        notes.append(
            f"GPU{first} and GPU{second}: {there} one way and {back} the other; taken as {known[0]}"
        )
    return known[0]


def _has_numa(row: Sequence[str], columns: Sequence[str]) -> bool:
    return len(row) > len(columns) + 1 and row[len(columns) + 1].isdigit()


def _names(lines: Sequence[str]) -> dict[int, str]:
    found = (_NAMED.match(line) for line in lines)
    return {int(match[1]): match[2] for match in found if match is not None}


def nvlinks(word: str) -> int:
    """Return how many NVLinks a class bonds; 0 for other classes."""
    found = _NVLINK.fullmatch(word)
    return int(found[1]) if found else 0


NVLINK = {
    "V100-16GB": ("NVLink2", 6),
    "V100-32GB": ("NVLink2", 6),
    "A100-40GB": ("NVLink3", 12),
    "A100-80GB": ("NVLink3", 12),
    "H100-80GB": ("NVLink4", 18),
    "H200": ("NVLink4", 18),
    "B200": ("NVLink5", 18),
}
"""The preset of all NVLinks of a device together, and how many these are (NVIDIA's datasheets)."""
OTHER_NVLINK = ("NVLink3", 12)
PCIE = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), "PCIe3-x16"),
    **dict.fromkeys(("H100-80GB", "H200", "B200", "MI300X"), "PCIe5-x16"),
}
OTHER_PCIE = "PCIe4-x16"
SYS_SHARE = 0.5
"""The share of PCIe's bandwidth that is assumed between sockets; machines differ widely."""


def read_topology_cluster(path: Path, device_type: str | None = None) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each
    has more of them than a device has. Switches stand for PCIe bridges (PIX, PXB), for the host
    bridges of a NUMA node (PHB, NODE) and for what joins sockets (SYS).

    Args:
        path: of the file.
        device_type: preset of the GPUs; None if the file names them, as ``nvidia-smi -L`` does.

    Raises:
        PipeplanError: if there is no whole table, or the GPUs' type is not known.
    """
    topology = read_topology(path)
    types = {gpu: _type(path, topology, gpu, device_type) for gpu in topology.gpus}
    wires, switches, notes = _wires(topology, types)
    cluster = cluster_of(
        path.stem,
        {_name(gpu): types[gpu].name for gpu in topology.gpus},
        {kind.name: kind.figures for kind in types.values()},
        switches,
        wires,
    )
    kind_notes = dict.fromkeys(kind.note for kind in types.values() if kind.note is not None)
    assumed = (
        "the table has classes of connections, no figures: bandwidths and latencies are presets "
        "and assumed; "
        "`torchrun -m executor.detect` measures them"
    )
    return ImportedCluster(cluster, (*topology.notes, *notes, *kind_notes, assumed))


def _type(path: Path, topology: NvidiaTopology, gpu: int, given: str | None) -> KnownType:
    if given is not None:
        if given not in DEVICES:
            raise PipeplanError(
                f"device_type: {given!r} is unknown; use one of {', '.join(DEVICES)}"
            )
        return KnownType(given, DEVICES[given])
    if gpu not in topology.names:
        raise PipeplanError(
            f"{path}: the table does not say what GPU{gpu} is; give --device-type PRESET, or put "
            "the lines of `nvidia-smi -L` into the file"
        )
    return named_type(topology.names[gpu], f"{path}: GPU{gpu}")


def _name(gpu: int) -> str:
    return f"gpu{gpu}"


def _wires(
    topology: NvidiaTopology, types: dict[int, KnownType]
) -> tuple[list[Wire], list[str], list[str]]:
    counts = {pair: nvlinks(word) for pair, word in topology.classes.items()}
    wires: list[Wire] = []
    switches: list[str] = []
    notes: list[str] = []
    ports = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in topology.gpus}
    most = {gpu: NVLINK.get(types[gpu].name, OTHER_NVLINK)[1] for gpu in topology.gpus}
    if any(counts.values()) and (odd := [t.name for t in types.values() if t.name not in NVLINK]):
        notes.append(f"{odd[0]}: an NVLink of it is assumed to be one of {OTHER_NVLINK[0]}")
    if all(sum(ports[gpu]) > most[gpu] for gpu in topology.gpus):
        switches.append("nvswitch")
        wires += [
            Wire((_name(gpu), "nvswitch"), _nvlink(types[gpu].name, max(ports[gpu])))
            for gpu in topology.gpus
        ]
    else:
        wires += [
            Wire((_name(a), _name(b)), _nvlink(types[a].name, count))
            for (a, b), count in counts.items()
            if count
        ]
    if any(not count for count in counts.values()) or len(counts) < _pairs(topology):
        tree = list(_pcie_tree(topology, types))
        wires += tree
        ends = dict.fromkeys(end for wire in tree for end in wire.between)
        switches += [end for end in ends if not end.startswith("gpu")]
    return wires, switches, notes


def _pairs(topology: NvidiaTopology) -> int:
    return len(list(combinations(topology.gpus, 2)))


def _nvlink(type_name: str, count: int) -> LinkType:
    preset, all_of_them = NVLINK.get(type_name, OTHER_NVLINK)
    width = LINKS[preset].bandwidth_gb_per_s * count / all_of_them
    return LINKS[preset].model_copy(update={"bandwidth_gb_per_s": width, "source": "assumed"})


def _pcie(type_name: str, share: float = 1.0) -> LinkType:
    kind = LINKS[PCIE.get(type_name, OTHER_PCIE)]
    width = kind.bandwidth_gb_per_s * share
    return kind.model_copy(update={"bandwidth_gb_per_s": width, "source": "assumed"})


def _pcie_tree(topology: NvidiaTopology, types: dict[int, KnownType]) -> Iterator[Wire]:
    """Bridges, NUMA nodes, and what joins these; a switch of one device is left out."""
    gpus = topology.gpus
    kind = types[gpus[0]].name
    bridges = _groups(gpus, _joined(topology, ("PIX", "PXB")))
    nodes = _groups(gpus, [*_joined(topology, ("PIX", "PXB", "PHB", "NODE")), *_of_numa(topology)])
    ends: dict[tuple[int, ...], str] = {}
    for number, group in enumerate(bridges):
        ends[group] = _name(group[0])
        if len(group) > 1:
            ends[group] = f"pcie{number}"
            for gpu in group:
                yield Wire((_name(gpu), ends[group]), _pcie(types[gpu].name))
    tops = []
    for number, node in enumerate(nodes):
        inside = [ends[group] for group in bridges if set(group) <= set(node)]
        tops.append(inside[0] if len(inside) == 1 else f"numa{number}")
        if len(inside) > 1:
            for end in inside:
                yield Wire((end, f"numa{number}"), _pcie(kind))
    if len(tops) == 2:
        yield Wire((tops[0], tops[1]), _pcie(kind, SYS_SHARE))
    elif len(tops) > 2:
        for top in tops:
            yield Wire((top, "sockets"), _pcie(kind, SYS_SHARE))


def _joined(topology: NvidiaTopology, classes: Sequence[str]) -> list[tuple[int, int]]:
    return [pair for pair, word in topology.classes.items() if word in classes]


def _of_numa(topology: NvidiaTopology) -> Iterator[tuple[int, int]]:
    """Pairs that NVLink joins, which show no class of PCIe, on one NUMA node."""
    for a, b in combinations(topology.gpus, 2):
        is_told = a in topology.numa and topology.numa.get(a) == topology.numa.get(b)
        if is_told and nvlinks(topology.classes.get((a, b), "")):
            yield a, b


def _groups(gpus: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    joined = UnionFind(gpus)
    for a, b in pairs:
        joined.union(a, b)
    return sorted(tuple(sorted(group)) for group in joined.to_sets())
