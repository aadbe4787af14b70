"""The table of ``nvidia-smi topo -m``: a row and a column for every GPU and network card.

Tables reach us with prefixes of launchers, wrapped lines and cells without a space in between, so
cells are read by their words, and the diagonal, whose cells are X, shows whether a row was read
right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.importing.imported import Pair
from planner.interop.importing.pcie import CLASSES

_NAME = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+")
_NAMES = re.compile(f"(?:{_NAME.pattern})+")
_NVLINK = re.compile(r"NV([1-9]|[12]\d|3[0-6])")  # No GPU has more than 18 yet.
_CELL = re.compile(rf"\s*(NV\d{{1,2}}|{'|'.join(CLASSES)}|SOC|X|OK|CNS|GNS|TNS|NS|DR|U|\S+)")
_OF_P2P = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
"""Words in the tables of ``nvidia-smi topo -p2p``."""
_CALLED = re.compile(r"\bGPU (\d+(?:,\d+)*): (.+?)\s*(?:\(UUID: .*)?$")
"""A line of ``nvidia-smi -L`` or of a report on the environment, which may be in the file."""
_SLICE = re.compile(r"\bMIG \d\S* +Device +\d+:")
_CARD = re.compile(r"\b(NIC\d+): (\S+)\s*$")
"""A line of the legend of network cards."""
_PCI_ONLY = re.compile(r"\btopo\s+(-mp|--matrix_pci)\b")
_REMEDY = "give the output of `nvidia-smi topo -m`"


@dataclass
class TopologyTable:
    """A table as printed.

    Attributes:
        line: number of its header.
        columns: names of GPUs and cards.
        after_numa: columns that follow NUMA Affinity; None if the table does not have it.
        cells: words of each row.
        tails: what follows them: CPU Affinity, which may be empty, NUMA Affinity, GPU NUMA ID.
    """

    line: int
    columns: list[str]
    after_numa: int | None = None
    cells: dict[str, list[str]] = field(default_factory=dict)
    tails: dict[str, list[str]] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        """The columns that are GPUs."""
        return [name for name in self.columns if name.startswith("GPU")]

    def numa(self, gpu: str) -> str | None:
        """The NUMA node of a GPU; None if it is not told, or the GPU is of a range of nodes.

        A list such as ``0,3-9`` is of one node and the memories of GPUs.
        """
        tail, after = self.tails[gpu], self.after_numa
        if after is None or len(tail) <= after:
            return None
        found = re.match(r"(\d+)(?![\d-])", tail[len(tail) - 1 - after])
        return None if found is None else found[1]


def looks_like_topology(head: str) -> bool:
    """Return whether such a table is at or near the beginning of a file."""
    return any(_columns(line) for line in head.splitlines())


def nvlinks(word: str) -> int:
    """Return how many NVLinks a class bonds; 0 for other classes."""
    found = _NVLINK.fullmatch(word)
    return int(found[1]) if found else 0


def _columns(line: str) -> list[str]:
    """Return the GPUs and cards that a line names as columns; none if it is no header."""
    words = line.replace("|", " ").split()
    start = next((n for n, word in enumerate(words) if re.search(r"GPU\d+", word)), len(words))
    text = " ".join(words[start:])
    # CPU Affinity, NUMA Affinity and GPU NUMA ID follow.
    named, _, more = text[text.find("GPU") :].partition("CPU")
    found = [
        name
        for word in named.split()
        for name in (_NAME.findall(word) if _NAMES.fullmatch(word) else [word])
    ]
    if any(word in CLASSES or word == "X" for word in found):
        return []
    is_second_known = len(found) > 1 and _NAME.fullmatch(found[1]) is not None
    return found if found and ("Affinity" in more or is_second_known) else []


def only_table(path: Path, lines: Sequence[str]) -> TopologyTable:
    """Return the one table of classes in the file, if it is whole."""
    if any(_PCI_ONLY.search(line) for line in lines):
        raise PipeplanError(f"{path}: is of `nvidia-smi topo -mp`, which hides NVLinks; {_REMEDY}")
    if slices := next((line.strip() for line in lines if _SLICE.search(line)), None):
        raise PipeplanError(
            f"{path}: a GPU is divided ({shorten(slices)}); slices reach each other neither by "
            "NVLink nor by PCIe, and the table is of whole GPUs: measure the slices by `torchrun "
            "-m executor.detect`, or give the file without them if they will be joined again"
        )
    tables = list(_tables(path, lines))
    if not tables:
        raise PipeplanError(
            f"{path}: has no table of `nvidia-smi topo -m`, whose first line names GPU0, GPU1, …"
        )
    matrices = [
        table
        for table in tables
        if _OF_P2P.isdisjoint(word for row in table.cells.values() for word in row)
    ]
    if not matrices:
        raise PipeplanError(
            f"{path}: is of `nvidia-smi topo -p2p`, which tells whether GPUs reach each other, not "
            f"how they are joined; {_REMEDY}"
        )
    if len(matrices) > 1:
        starts = ", ".join(str(table.line) for table in matrices[:8])
        raise PipeplanError(
            f"{path}: has {len(matrices)} tables, which begin on lines {starts}; a file is of one "
            "machine: give each its own, and join them by `pipeplan import`"
        )
    _require_whole(path, matrices[0])
    return matrices[0]


def _tables(path: Path, lines: Sequence[str]) -> Iterator[TopologyTable]:
    starts = [n for n, line in enumerate(lines) if _columns(line)]
    for start, end in pairwise([*starts, len(lines)]):
        table, header = (
            TopologyTable(start + 1, _columns(lines[start])),
            " ".join(lines[start].split()),
        )
        if "NUMA Affinity" in header.replace("|", "").replace("  ", " "):
            table.after_numa = int("GPU NUMA ID" in header)
        first = next((n for n in range(start + 1, end) if _row_start(lines[n], table)), end)
        for line in lines[start + 1 : first]:  # The header may go on.
            if "CPU" in header or not line.strip():
                break
            table.columns += _NAME.findall(line.partition("CPU")[0])
        for number in range(first, end):
            _add_row(path, table, lines, number, end)
        yield table


def _row_start(line: str, table: TopologyTable) -> tuple[str, str] | None:
    """Return the column that a line is the row of, and the text behind its name."""
    names = "|".join(map(re.escape, sorted(table.columns, key=len, reverse=True)))
    # Classes have no small letters, unlike what legends and reports say of a GPU.
    found = re.search(rf"(?<![\w.-])({names})\s+([^:a-z\s].*)$", line.replace("|", " "))
    return None if found is None else (found[1], found[2])


def _add_row(path: Path, table: TopologyTable, lines: Sequence[str], number: int, end: int) -> None:
    """Read a row, which may go on in the next lines."""
    begun = _row_start(lines[number], table)
    if begun is None:
        return
    name, text = begun
    if name in table.cells:
        raise PipeplanError(
            f"{path}: line {number + 1}: a second row of {name}; a file is of one machine, and "
            "lines of several must not be mixed"
        )
    cells, tail = _cells(text, len(table.columns))
    while len(cells) < len(table.columns) and (number := number + 1) < end:
        if _row_start(lines[number], table) or not _CELL.match(lines[number]):
            break
        text = f"{text} {lines[number]}"
        cells, tail = _cells(text, len(table.columns))
    table.cells[name], table.tails[name] = cells, tail


def _cells(text: str, count: int) -> tuple[list[str], list[str]]:
    """Return that many words of a row, and the words that follow."""
    found = [match for match, _ in zip(_CELL.finditer(text), range(count), strict=False)]
    return [match[1] for match in found], text[found[-1].end() if found else 0 :].split()


def _require_whole(path: Path, table: TopologyTable) -> None:
    """Refuse a table that lacks rows or cells, or whose cells are not below their columns."""
    if missing := [name for name in table.columns if name not in table.cells]:
        raise PipeplanError(
            f"{path}: the table has no row of {', '.join(missing)}; it may be cut off"
        )
    for place, name in enumerate(table.columns):
        cells = table.cells[name]
        if len(cells) < len(table.columns):
            raise PipeplanError(
                f"{path}: row {name} has {len(cells)} cells for {len(table.columns)} columns; it "
                "may be cut off"
            )
        if cells[place] != "X":
            raise PipeplanError(
                f"{path}: row {name}: expected X in its own column, found "
                f"{shorten(cells[place])}; cells or columns are missing or joined: separate them "
                "by spaces"
            )
    if len(table.gpus) == len(table.columns) == 1:
        raise PipeplanError(f"{path}: the table has one GPU; links join two or more")


def names_of(lines: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the names in the cluster by column: ``gpu0``, and cards as the legend calls them."""
    legend = {found[1]: found[2] for line in lines if (found := _CARD.search(line))}
    return {name: legend.get(name, name if "_" in name else name.lower()) for name in columns}


def called_in(lines: Sequence[str]) -> dict[str, str]:
    """Return what the driver calls each GPU, where the file says so."""
    return {
        f"gpu{int(number)}": found[2]
        for line in lines
        if (found := _CALLED.search(line))
        for number in found[1].split(",")
    }


def class_of(path: Path, table: TopologyTable, pair: Pair, notes: list[str]) -> str:
    """Return the class of two columns; a note is added if it differs by direction."""
    words = [table.cells[a][table.columns.index(b)] for a, b in (pair, pair[::-1])]
    there, back = ("SYS" if word == "SOC" else word for word in words)  # SOC: before 2018.
    known = [word for word in (there, back) if word in CLASSES or nvlinks(word)]
    if not known:
        raise PipeplanError(
            f"{path}: {pair[0]} and {pair[1]}: {shorten(there)} is none of NV#, "
            f"{', '.join(CLASSES)}; correct it, or {_REMEDY} again"
        )
    if there != back:
        notes.append(
            f"{pair[0]} and {pair[1]}: {there} one way and {back} the other; taken as {known[0]}"
        )
    return known[0]
