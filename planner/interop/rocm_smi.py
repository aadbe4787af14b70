"""A machine's cluster from ``rocm-smi --showtopo``, with assumed figures.

The tables have a row and a column for every GPU: the kind of link between two (XGMI or PCIE) and
its weight, 15 for each xGMI link on the way. Lines below them name each GPU's NUMA node. The output
of ``--shownodesbw`` (bandwidth of direct links) and ``--showproductname`` may stand in the same
file. GPUs that xGMI joins have a link of their own. All are on the host bridges of their NUMA nodes
as well, where links to other machines are added, since the tables have no network cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from planner.errors import shorten
from planner.interop.machines import (
    ASSUMED_FIGURES,
    Capture,
    ImportedCluster,
    ImportOptions,
    Pair,
    PcieTree,
    Wire,
    assumed,
    gpu_types,
    imported,
    notes_on_ports,
    ports_of,
)

_TITLE = re.compile(r"^(.*?)=+ (.+?) =+$")
_GPU = re.compile(r"GPU(\d+)")
_OF_GPU = re.compile(r"^GPU ?\[?(\d+)\]?\s*: (.+?):\s*(.+?)\s*$")
_WIDTH = re.compile(r"(\d+)-(\d+)")
KIND, WEIGHT, BANDWIDTH = "Link Type between two GPUs", "Weight between two GPUs", "Bandwidth"
NUMA, SERIES = "(Topology) Numa Node", "Card Series"
AMD_SMI = "LINK TYPE TABLE:"
KINDS = ("XGMI", "PCIE")
OTHER_FABRIC = "xGMI-MI250X"
"""Assumed for GPUs whose xGMI links are not known."""


def is_rocm_smi(head: str) -> bool:
    """Return whether such tables are at or near the beginning of a file."""
    titles = {match[2] for line in head.splitlines() if (match := _TITLE.match(line.rstrip()))}
    return bool(titles & {KIND, WEIGHT}) or AMD_SMI in head


def read_rocm_smi(found: Capture, options: ImportOptions) -> ImportedCluster:
    """Read the tables into a cluster of one machine.

    Args:
        found: the file.
        options: the GPUs' type, if the file does not name it, and what is given of their ports.

    Raises:
        PipeplanError: naming the line, if the table of link types is missing or cut off, or the
            GPUs' type is not known.
    """
    lines = _without_prefix(found.lines)
    if any(line.startswith(AMD_SMI) for line in lines):
        raise found.wrong("is of `amd-smi topology`; give the output of `rocm-smi --showtopo`")
    kinds, weights, widths = (
        dict(_cells(found, title, lines)) for title in (KIND, WEIGHT, BANDWIDTH)
    )
    if not kinds:
        raise found.wrong(
            f"has no table {KIND!r} of two GPUs or more; give the whole output of `rocm-smi "
            "--showtopo`"
        )
    gpus = tuple(dict.fromkeys(name for pair in kinds for name in pair))
    remedy = "the output of `rocm-smi --showproductname`"
    types = gpu_types(found, gpus, _of_gpus(lines, SERIES), options, remedy)
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    xgmi = [pair for pair, kind in kinds.items() if kind == "XGMI"]
    gb_per_s = {
        pair: int(width[2]) / 1000
        for pair, word in widths.items()
        if (width := _WIDTH.fullmatch(word)) and int(width[2])
    }
    wires = []
    for pair in xgmi:
        link = assumed(ports[pair[0]].fabric or OTHER_FABRIC)
        update = {"bandwidth_gb_per_s": gb_per_s[pair]} if pair in gb_per_s else {}
        wires.append(Wire(pair, link.model_copy(update=update)))
    numa = _of_gpus(lines, NUMA)
    classes = {
        (a, b): "NODE" if numa.get(a) == numa.get(b) else "SYS" for a, b in combinations(gpus, 2)
    }
    wires += PcieTree(ports, (), classes, numa).wires
    fabric = OTHER_FABRIC if any(pair not in gb_per_s for pair in xgmi) else None
    notes = (
        *_notes(xgmi, weights, has_bandwidths=bool(gb_per_s)),
        *notes_on_ports(types.values(), options, fabric),
        ASSUMED_FIGURES,
    )
    return imported(found.path.stem, types, wires, notes)


def _without_prefix(lines: Sequence[str]) -> list[str]:
    """Take away what a launcher puts before each line: as much as before the titles."""
    titles = (match for line in lines if (match := _TITLE.match(line.rstrip())) is not None)
    length = next((len(match[1]) for match in titles if match[2] in (KIND, WEIGHT)), 0)
    return [line[length:].strip() for line in lines]


def _cells(found: Capture, title: str, lines: Sequence[str]) -> Iterator[tuple[Pair, str]]:
    """Yield the entries of a table for the pairs of its GPUs, above the diagonal."""
    titles = [match[2] if (match := _TITLE.match(line)) else "" for line in lines]
    if title not in titles:
        return
    start = titles.index(title) + 1
    columns = lines[start].split() if start < len(lines) else []
    if not columns or not all(_GPU.fullmatch(word) for word in columns):
        raise found.wrong(
            f"expected the GPUs of {title!r}, such as GPU0 GPU1; found "
            f"{shorten(' '.join(columns))}",
            start + 1,
        )
    for row, name in enumerate(columns):
        number = start + 1 + row
        words = lines[number].split() if number < len(lines) else []
        if words[:1] != [name] or len(words) != len(columns) + 1:
            raise found.wrong(
                f"{title!r}: expected {name} and {len(columns)} entries, found "
                f"{shorten(' '.join(words))}; it may be cut off",
                number + 1,
            )
        for column, word in zip(columns[row + 1 :], words[row + 2 :], strict=True):
            if title == KIND and word not in KINDS:
                raise found.wrong(
                    f"{name} and {column}: expected {' or '.join(KINDS)}, found {shorten(word)}",
                    number + 1,
                )
            yield (name.lower(), column.lower()), word


def _of_gpus(lines: Sequence[str], what: str) -> dict[str, str]:
    """Return what lines say of single GPUs, such as their NUMA node."""
    matches = (match for line in lines if (match := _OF_GPU.match(line)) is not None)
    return {f"gpu{match[1]}": match[3] for match in matches if match[2] == what}


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
