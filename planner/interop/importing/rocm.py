"""A machine's cluster from ``rocm-smi --showtopo``, with assumed figures.

The tables have a row and a column for every GPU: the kind of link between two (XGMI or PCIE) and
its weight, 15 for each xGMI link on the way. Lines below them name each GPU's NUMA node. The output
of ``--shownodesbw`` (bandwidth of direct links) and ``--showproductname`` may stand in the same
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from planner.cluster.hardware import LinkType
from planner.cluster.ports import Ports
from planner.errors import PipeplanError, shorten
from planner.interop.importing.captured import captured_lines
from planner.interop.importing.imported import (
    ImportedCluster,
    ImportOptions,
    Pair,
    Wire,
    gpu_types,
    imported_machine,
    notes_on_ports,
    ports_of,
)
from planner.interop.importing.pcie import PcieTree, assumed

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


def looks_like_rocm_topology(head: str) -> bool:
    """Return whether such tables are at or near the beginning of a file."""
    titles = {match[2] for line in head.splitlines() if (match := _TITLE.match(line.rstrip()))}
    return bool(titles & {KIND, WEIGHT}) or AMD_SMI in head


def read_rocm_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read the tables into a cluster of one machine.

    GPUs that xGMI joins have a link of their own. All are on the host bridges of their NUMA nodes
    as well, where links to other machines are added, since the tables have no network cards.

    Args:
        path: of the file.
        options: the GPUs' type, if the file does not name it, and what is given of their ports.

    Raises:
        PipeplanError: naming the line, if the table of link types is missing or cut off, or the
            GPUs' type is not known.
    """
    lines = _without_prefix(captured_lines(path))
    if any(line.startswith(AMD_SMI) for line in lines):
        raise PipeplanError(
            f"{path}: is of `amd-smi topology`; give the output of `rocm-smi --showtopo`"
        )
    kinds, weights, widths = (
        dict(_cells(path, title, lines)) for title in (KIND, WEIGHT, BANDWIDTH)
    )
    if not kinds:
        raise PipeplanError(
            f"{path}: has no table {KIND!r} of two GPUs or more; give the whole output of "
            "`rocm-smi --showtopo`"
        )
    gpus = tuple(dict.fromkeys(name for pair in kinds for name in pair))
    named = _of_gpus(lines, SERIES)
    remedy = "the output of `rocm-smi --showproductname`"
    types = gpu_types(path, gpus, named, options, remedy)
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    xgmi = [pair for pair, kind in kinds.items() if kind == "XGMI"]
    gb_per_s = {
        pair: int(found[2]) / 1000
        for pair, word in widths.items()
        if (found := _BANDWIDTH.fullmatch(word)) and int(found[2])
    }
    wires = [Wire(pair, _xgmi(ports[pair[0]], gb_per_s.get(pair))) for pair in xgmi]
    numa = _of_gpus(lines, NUMA)
    wires += PcieTree(ports, (), _classes(gpus, numa), numa).wires()
    fabric = OTHER_FABRIC if any(pair not in gb_per_s for pair in xgmi) else None
    notes = _notes(xgmi, weights, has_bandwidths=bool(gb_per_s))
    ports_notes = notes_on_ports(types.values(), options, fabric)
    return imported_machine(path.stem, types, wires, (*notes, *ports_notes))


def _without_prefix(lines: Sequence[str]) -> list[str]:
    """Take away what a launcher puts before each line: as much as before the titles."""
    found = (match for line in lines if (match := _TITLE.match(line.rstrip())) is not None)
    length = next((len(match[1]) for match in found if match[2] in (KIND, WEIGHT)), 0)
    return [line[length:].strip() for line in lines]


def _cells(path: Path, title: str, lines: Sequence[str]) -> Iterator[tuple[Pair, str]]:
    """Yield the entries of a table for the pairs of its GPUs, above the diagonal."""
    titles = [found[2] if (found := _TITLE.match(line)) else "" for line in lines]
    if title not in titles:
        return
    start = titles.index(title) + 1
    columns = lines[start].split() if start < len(lines) else []
    if not columns or not all(_GPU.fullmatch(word) for word in columns):
        raise PipeplanError(
            f"{path}: line {start + 1}: expected the GPUs of {title!r}, such as GPU0 GPU1; found "
            f"{shorten(' '.join(columns))}"
        )
    for row, name in enumerate(columns):
        number = start + 1 + row
        words = lines[number].split() if number < len(lines) else []
        if words[:1] != [name] or len(words) != len(columns) + 1:
            raise PipeplanError(
                f"{path}: line {number + 1}: {title!r}: expected {name} and {len(columns)} "
                f"entries, found {shorten(' '.join(words))}; it may be cut off"
            )
        for column, word in zip(columns[row + 1 :], words[row + 2 :], strict=True):
            if title == KIND and word not in KINDS:
                raise PipeplanError(
                    f"{path}: line {number + 1}: {name} and {column}: expected "
                    f"{' or '.join(KINDS)}, found {shorten(word)}"
                )
            yield (name.lower(), column.lower()), word


def _of_gpus(lines: Sequence[str], what: str) -> dict[str, str]:
    """Return what lines say of single GPUs, such as their NUMA node."""
    found = (match for line in lines if (match := _OF_GPU.match(line)) is not None)
    return {f"gpu{match[1]}": match[3] for match in found if match[2] == what}


def _xgmi(ports: Ports, gb_per_s: float | None) -> LinkType:
    link = assumed(ports.fabric or OTHER_FABRIC)
    return link.model_copy(update={} if gb_per_s is None else {"bandwidth_gb_per_s": gb_per_s})


def _classes(gpus: Sequence[str], numa: Mapping[str, str]) -> dict[Pair, str]:
    """Return NODE for GPUs of one NUMA node or where nodes are not told, else SYS."""
    return {
        (a, b): "NODE" if numa.get(a) == numa.get(b) else "SYS" for a, b in combinations(gpus, 2)
    }


def _notes(
    xgmi: Sequence[Pair], weights: Mapping[Pair, str], *, has_bandwidths: bool
) -> Iterator[str]:
    if xgmi and not has_bandwidths:
        yield (
            "xGMI between two GPUs is taken as one link; put the output of `rocm-smi "
            "--shownodesbw` into the file where some have several"
        )
    known = {pair: int(weights[pair]) for pair in xgmi if weights.get(pair, "").isdecimal()}
    # More than the least of all: other GPUs are on the way.
    further = [pair for pair, weight in known.items() if weight > min(known.values())]
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
