"""A machine's cluster from ``rocm-smi --showtopo``, with assumed figures.

The tables have a row and a column for every GPU: the kind of link between two (XGMI or PCIE) and
its weight, 15 for each xGMI link on the way. Lines below them name each GPU's NUMA node. The output
of ``--shownodesbw`` (bandwidth of direct links) and ``--showproductname`` may stand in the same
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from planner.cluster.hardware import LinkType
from planner.cluster.ports import Ports
from planner.errors import PipeplanError, shorten
from planner.interop.importing.captured import captured_lines
from planner.interop.importing.imported import ImportedCluster, ImportOptions, Wire
from planner.interop.importing.pcie import (
    Pair,
    PcieMachine,
    assumed,
    gpu_types,
    imported_machine,
    notes_on_ports,
    pcie_tree,
    ports_of,
)

_TITLE = re.compile(r"^(.*?)=+ (.+?) =+$")
_GPU = re.compile(r"GPU(\d+)")
_OF_GPU = re.compile(r"^GPU ?\[?(\d+)\]?\s*: (.+?):\s*(.+?)\s*$")
_BANDWIDTH = re.compile(r"(\d+)-(\d+)")
KIND, WEIGHT, BANDWIDTH = "Link Type between two GPUs", "Weight between two GPUs", "Bandwidth"
NUMA, SERIES = "(Topology) Numa Node", "Card Series"
AMD_SMI = "LINK TYPE TABLE:"
KINDS = ("XGMI", "PCIE")
OTHER_FABRIC = "xGMI-MI250X"
"""Assumed for GPUs whose xGMI links are not known."""
Table = Mapping[Pair, str]


@dataclass(frozen=True)
class RocmTopology:
    """What the file says.

    Attributes:
        gpus: names of GPUs, such as ``gpu0``, in the order of rows.
        kinds: ``XGMI`` or ``PCIE``, by two names in that order.
        weights: of connections; empty if the table is missing.
        megabytes_per_s: bandwidth of direct xGMI links where it is told, in 10^6 bytes/s.
        numa: node of each GPU where it is told.
        names: what the driver calls each GPU where that is told.
    """

    gpus: tuple[str, ...]
    kinds: Table
    weights: Mapping[Pair, int]
    megabytes_per_s: Mapping[Pair, int]
    numa: Mapping[str, str]
    names: Mapping[str, str]

    @property
    def xgmi(self) -> list[Pair]:
        """The pairs that xGMI joins."""
        return [pair for pair, kind in self.kinds.items() if kind == "XGMI"]

    def is_direct(self, pair: Pair) -> bool:
        """Return whether no other GPU is on the way: its weight is the least of all."""
        least = min((self.weights[pair] for pair in self.xgmi if pair in self.weights), default=0)
        return self.weights.get(pair, least) == least


def looks_like_rocm_topology(head: str) -> bool:
    """Return whether such tables are at or near the beginning of a file."""
    titles = {match[2] for line in head.splitlines() if (match := _TITLE.match(line.rstrip()))}
    return bool(titles & {KIND, WEIGHT}) or AMD_SMI in head


def read_rocm_topology(path: Path) -> RocmTopology:
    """Read the tables.

    Raises:
        PipeplanError: naming the line, if the table of link types is missing or cut off.
    """
    lines = _without_prefix(captured_lines(path))
    if any(line.startswith(AMD_SMI) for line in lines):
        raise PipeplanError(
            f"{path}: is of `amd-smi topology`; give the output of `rocm-smi --showtopo`"
        )
    tables = {title: dict(_cells(path, title, lines)) for title in (KIND, WEIGHT, BANDWIDTH)}
    if not tables[KIND]:
        raise PipeplanError(
            f"{path}: has no table {KIND!r} of two GPUs or more; give the whole output of "
            "`rocm-smi --showtopo`"
        )
    told = [match for line in lines if (match := _OF_GPU.match(line)) is not None]
    speeds = {
        pair: int(match[2])
        for pair, word in tables[BANDWIDTH].items()
        if (match := _BANDWIDTH.fullmatch(word)) is not None and int(match[2])
    }
    return RocmTopology(
        gpus=tuple(dict.fromkeys(name for pair in tables[KIND] for name in pair)),
        kinds=tables[KIND],
        weights={pair: int(word) for pair, word in tables[WEIGHT].items() if word.isdecimal()},
        megabytes_per_s=speeds,
        numa={f"gpu{match[1]}": match[3] for match in told if match[2] == NUMA},
        names={f"gpu{match[1]}": match[3] for match in told if match[2] == SERIES},
    )


def _without_prefix(lines: Sequence[str]) -> list[str]:
    """Take away what a launcher puts before each line: as much as before the titles."""
    found = (match for line in lines if (match := _TITLE.match(line.rstrip())) is not None)
    length = next((len(match[1]) for match in found if match[2] in (KIND, WEIGHT)), 0)
    return [line[length:].strip() for line in lines]


def _cells(path: Path, title: str, lines: Sequence[str]) -> Iterator[tuple[Pair, str]]:
    """Yield the entries of a table for the pairs of its GPUs, above the diagonal."""
    start = next(
        (n for n, line in enumerate(lines) if (m := _TITLE.match(line)) and m[2] == title), None
    )
    if start is None:
        return
    columns = lines[start + 1].split() if start + 1 < len(lines) else []
    if not columns or not all(_GPU.fullmatch(word) for word in columns):
        raise PipeplanError(
            f"{path}: line {start + 2}: expected the GPUs of {title!r}, such as GPU0 GPU1; found "
            f"{shorten(' '.join(columns))}"
        )
    for row, name in enumerate(columns):
        number = start + 2 + row
        words = lines[number].split() if number < len(lines) else []
        if words[:1] != [name] or len(words) != len(columns) + 1:
            raise PipeplanError(
                f"{path}: line {number + 1}: {title!r}: expected {name} and {len(columns)} "
                f"entries, found {shorten(' '.join(words))}; it may be cut off"
            )
        for column, word in enumerate(words[row + 2 :], row + 1):
            if title == KIND and word not in KINDS:
                raise PipeplanError(
                    f"{path}: line {number + 1}: {name} and {columns[column]}: expected "
                    f"{' or '.join(KINDS)}, found {shorten(word)}"
                )
            yield (name.lower(), columns[column].lower()), word


def read_rocm_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the tables into a cluster of one machine.

    GPUs that xGMI joins have a link of their own. All are on the host bridges of their NUMA nodes
    as well, where links to other machines are added, since the tables have no network cards.

    Args:
        path: of the file.
        options: the GPUs' type, if the file does not name it, and what is given of their ports.

    Raises:
        PipeplanError: if there is no whole table, or the GPUs' type is not known.
    """
    topology = read_rocm_topology(path)
    remedy = "the output of `rocm-smi --showproductname`"
    types = gpu_types(path, topology.gpus, topology.names, options, remedy)
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    wires = [Wire(pair, _xgmi(topology, ports[pair[0]], pair)) for pair in topology.xgmi]
    wires += pcie_tree(PcieMachine(ports, (), _classes(topology), topology.numa))
    is_assumed = any(pair not in topology.megabytes_per_s for pair in topology.xgmi)
    fabric = OTHER_FABRIC if is_assumed else None
    notes = (*_notes(topology), *notes_on_ports(types.values(), options, fabric))
    return imported_machine(path.stem, types, wires, notes)


def _xgmi(topology: RocmTopology, ports: Ports, pair: Pair) -> LinkType:
    link = assumed(ports.fabric or OTHER_FABRIC)
    if pair in topology.megabytes_per_s:
        return link.model_copy(update={"bandwidth_gb_per_s": topology.megabytes_per_s[pair] / 1000})
    return link


def _classes(topology: RocmTopology) -> dict[Pair, str]:
    """Return NODE for GPUs of one NUMA node or where nodes are not told, else SYS."""
    numa = topology.numa
    return {
        (a, b): "NODE" if numa.get(a) == numa.get(b) else "SYS"
        for a, b in combinations(topology.gpus, 2)
    }


def _notes(topology: RocmTopology) -> Iterator[str]:
    if topology.xgmi and not topology.megabytes_per_s:
        yield (
            "xGMI between two GPUs is taken as one link; put the output of `rocm-smi "
            "--shownodesbw` into the file where some have several"
        )
    further = [pair for pair in topology.xgmi if not topology.is_direct(pair)]
    if further:
        yield (
            f"{len(further)} pairs, such as {further[0][0]} and {further[0][1]}, are joined by "
            "xGMI through other GPUs: their links are taken as their own, though they share those "
            "on the way"
        )
    yield (
        "the tables have no network cards: name what leads to other machines with --card in "
        "`pipeplan import`, such as --card 'gpu*' where each GPU has a card"
    )
