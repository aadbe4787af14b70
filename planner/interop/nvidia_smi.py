"""A machine's cluster from ``nvidia-smi topo -m``: a row and a column for each GPU and card.

A class names a kind of connection without figures, so every link of the cluster is assumed: NVLink
by the number of bonded links, anything else as PCIe (:class:`planner.interop.machines.PcieTree`).
GPUs with NVLinks have them as links of their own, or by a switch (``nvswitch``) where each has more
of them than a device has. Network cards are switches, to which links to other machines are added.

Tables reach us with prefixes of launchers, wrapped lines and cells without a space in between, so
cells are read by their words, and the diagonal, whose cells are X, shows whether a row was read
right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from planner.cluster.device_types import KnownType, presets_called
from planner.cluster.ports import FABRIC_LINKS, PORTS, Ports
from planner.errors import shorten
from planner.interop.machines import (
    ASSUMED_FIGURES,
    CLASSES,
    NVSWITCH,
    OTHER_NVLINK,
    Capture,
    ImportedCluster,
    ImportOptions,
    Pair,
    PcieTree,
    Wire,
    alone_note,
    gpu_types,
    imported,
    joined_groups,
    notes_on_ports,
    nvlink,
    ports_of,
)

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
_MOST_NVLINKS = 18
"""NVLinks that a GPU of unknown type may have."""
_OF_RACKS = ("GB200", "GB300")


@dataclass
class _Table:
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

    @property
    def cards(self) -> list[str]:
        """The columns that are network cards."""
        return [name for name in self.columns if not name.startswith("GPU")]

    def numa(self, gpu: str) -> str | None:
        """The NUMA node of a GPU; None if it is not given, or the GPU is of a range of nodes.

        A list such as ``0,3-9`` is of one node and the memories of GPUs.
        """
        tail, after = self.tails[gpu], self.after_numa
        if after is None or len(tail) <= after:
            return None
        found = re.match(r"(\d+)(?![\d-])", tail[len(tail) - 1 - after])
        return None if found is None else found[1]


def is_nvidia_smi(head: str) -> bool:
    """Return whether such a table is at or near the beginning of a file."""
    return any(_columns(line) for line in head.splitlines())


def read_nvidia_smi(found: Capture, options: ImportOptions) -> ImportedCluster:
    """Read the table into a cluster of one machine.

    Args:
        found: the file.
        options: the GPUs' type, if the file does not name them as ``nvidia-smi -L`` does, and what
            is given of their ports.

    Raises:
        PipeplanError: naming the line, if there is no such table or it is cut off, has words that
            are no classes, is of several machines, or leaves NVLinks out; if the GPUs' type is not
            known, or does not have the NVLinks of the table.
    """
    table = _only_table(found)
    legend = {match[1]: match[2] for line in found.lines if (match := _CARD.search(line))}
    names = {
        name: legend.get(name, name if "_" in name else name.lower()) for name in table.columns
    }
    gpus, cards = [names[name] for name in table.gpus], [names[name] for name in table.cards]
    notes: list[str] = []
    classes = {
        (names[a], names[b]): _class_of(found, table, (a, b), notes)
        for a, b in combinations([*table.gpus, *table.cards], 2)
    }
    called = {
        f"gpu{int(number)}": match[2]
        for line in found.lines
        if (match := _CALLED.search(line))
        for number in match[1].split(",")
    }
    types = gpu_types(found, gpus, called, options, "the lines of `nvidia-smi -L`")
    ports = {gpu: ports_of(kind.name, options) for gpu, kind in types.items()}
    counts = {pair: count for pair, word in classes.items() if (count := _nvlinks(word))}
    _require_nvlinks(found, types, counts)
    wires = _fabric(ports, counts)
    if cards or len(counts) < len(classes):
        over_pcie = {pair: word for pair, word in classes.items() if pair not in counts}
        nodes = {names[gpu]: node for gpu in table.gpus if (node := table.numa(gpu)) is not None}
        wires += PcieTree(ports, cards, over_pcie, nodes).wires
    notes += notes_on_ports(types.values(), options, OTHER_NVLINK if counts else None)
    given = options.known_type
    for name in dict.fromkeys(called.values()):
        if given is not None and given.name not in presets_called(name):
            notes.append(
                f"the file calls a GPU {name!r}; it is taken as {given.name} (--device-type)"
            )
    notes += _notes(cards, types, counts)
    return imported(found.path.stem, types, wires, (*notes, ASSUMED_FIGURES))


# --- the links ------------------------------------------------------------------------------------


def _nvlinks(word: str) -> int:
    """Return how many NVLinks a class bonds; 0 for other classes."""
    found = _NVLINK.fullmatch(word)
    return int(found[1]) if found else 0


def _class_of(found: Capture, table: _Table, pair: Pair, notes: list[str]) -> str:
    """Return the class of two columns; a note is added if it differs by direction."""
    words = [table.cells[a][table.columns.index(b)] for a, b in (pair, pair[::-1])]
    there, back = ("SYS" if word == "SOC" else word for word in words)  # SOC: before 2018.
    known = [word for word in (there, back) if word in CLASSES or _nvlinks(word)]
    if not known:
        raise found.wrong(
            f"{pair[0]} and {pair[1]}: {shorten(there)} is none of NV#, {', '.join(CLASSES)}; "
            f"correct it, or {_REMEDY} again"
        )
    if there != back:
        notes.append(
            f"{pair[0]} and {pair[1]}: {there} one way and {back} the other; taken as {known[0]}"
        )
    return known[0]


def _most_nvlinks(ports: Ports | None, unknown: int) -> int:
    """Return the NVLinks of a GPU in all, or what is given where its fabric is not known."""
    return FABRIC_LINKS[ports.fabric] if ports and ports.fabric else unknown


def _require_nvlinks(
    found: Capture, types: Mapping[str, KnownType], counts: Mapping[Pair, int]
) -> None:
    """Refuse a type of GPU that cannot have the NVLinks of the table."""
    for pair, count in counts.items():
        for name in (types[gpu].name for gpu in pair):
            most = _most_nvlinks(PORTS.get(name), 0 if name in PORTS else _MOST_NVLINKS)
            if count > most:
                has = f"at most {most} NVLinks" if most else "no NVLinks"
                raise found.wrong(
                    f"{pair[0]} and {pair[1]} are joined by NV{count}, and {name} has {has}; give "
                    "the --device-type of these GPUs"
                )


def _fabric(ports: Mapping[str, Ports], counts: Mapping[Pair, int]) -> list[Wire]:
    """Return the links of GPUs that NVLinks join; each group of them may have its own switch."""
    own = {gpu: [n for pair, n in counts.items() if gpu in pair] for gpu in ports}
    switched = [
        group
        for group in joined_groups([*ports], counts)
        if any(sum(own[gpu]) > _most_nvlinks(ports[gpu], _MOST_NVLINKS) for gpu in group)
    ]
    wires = []
    for number, group in enumerate(switched):
        switch = NVSWITCH if len(switched) == 1 else f"{NVSWITCH}{number}"
        wires += [Wire((gpu, switch), nvlink(ports[gpu], max(own[gpu]))) for gpu in group]
    behind = {gpu for group in switched for gpu in group}
    direct = {pair: count for pair, count in counts.items() if pair[0] not in behind}
    return [*wires, *(Wire(pair, nvlink(ports[pair[0]], n)) for pair, n in direct.items())]


def _notes(
    cards: Sequence[str], types: Mapping[str, KnownType], counts: Mapping[Pair, int]
) -> Iterator[str]:
    yield from alone_note(types, (gpu for pair in counts for gpu in pair))
    for name in dict.fromkeys(kind.name for kind in types.values()):
        if not counts and len(types) > 1 and name in PORTS and PORTS[name].fabric:
            yield (
                f"{name}: the table shows no NVLinks; if these GPUs have them, the table is of "
                "`topo -mp`, or they are inactive (`nvidia-smi nvlink -s`)"
            )
        if name in _OF_RACKS:
            yield (
                f"{name}: a rack's other trays are on the same NVLink switches; `pipeplan import "
                "TRAY… --card 'gpu*' --network NVLink5` joins the trays' files by them"
            )
    if cards:
        shown = f"{', '.join(cards[:4])}{' and more' if len(cards) > 4 else ''}"
        yield f"`pipeplan import` joins this box to others by its network cards ({shown})"


# --- the table ------------------------------------------------------------------------------------


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


def _only_table(found: Capture) -> _Table:
    """Return the one table of classes in the file, if it is whole."""
    if any(_PCI_ONLY.search(line) for line in found.lines):
        raise found.wrong(f"is of `nvidia-smi topo -mp`, which hides NVLinks; {_REMEDY}")
    if slices := next((line.strip() for line in found.lines if _SLICE.search(line)), None):
        raise found.wrong(
            f"a GPU is divided ({shorten(slices)}); slices reach each other neither by NVLink nor "
            "by PCIe, and the table is of whole GPUs: measure the slices by `torchrun -m "
            "executor.detect`, or give the file without them if they will be joined again"
        )
    tables = list(_tables(found))
    if not tables:
        raise found.wrong(
            "has no table of `nvidia-smi topo -m`, whose first line names GPU0, GPU1, …"
        )
    whole = [
        row
        for row in tables
        if _OF_P2P.isdisjoint(w for cells in row.cells.values() for w in cells)
    ]
    if not whole:
        raise found.wrong(
            "is of `nvidia-smi topo -p2p`, which tells whether GPUs reach each other, not how they "
            f"are joined; {_REMEDY}"
        )
    if len(whole) > 1:
        raise found.wrong(
            f"has {len(whole)} tables, which begin on lines "
            f"{', '.join(str(table.line) for table in whole[:8])}; a file is of one machine: give "
            "each its own, and join them by `pipeplan import`"
        )
    _require_whole(found, whole[0])
    return whole[0]


def _tables(found: Capture) -> Iterator[_Table]:
    lines = found.lines
    starts = [n for n, line in enumerate(lines) if _columns(line)]
    for start, end in pairwise([*starts, len(lines)]):
        table, header = _Table(start + 1, _columns(lines[start])), " ".join(lines[start].split())
        if "NUMA Affinity" in header.replace("|", "").replace("  ", " "):
            table.after_numa = int("GPU NUMA ID" in header)
        first = next((n for n in range(start + 1, end) if _row_start(lines[n], table)), end)
        for line in lines[start + 1 : first]:  # The header may go on.
            if "CPU" in header or not line.strip():
                break
            table.columns += _NAME.findall(line.partition("CPU")[0])
        for number in range(first, end):
            _add_row(found, table, number, end)
        yield table


def _row_start(line: str, table: _Table) -> tuple[str, str] | None:
    """Return the column that a line is the row of, and the text behind its name."""
    names = "|".join(map(re.escape, sorted(table.columns, key=len, reverse=True)))
    # Classes have no small letters, unlike what legends and reports say of a GPU.
    found = re.search(rf"(?<![\w.-])({names})\s+([^:a-z\s].*)$", line.replace("|", " "))
    return None if found is None else (found[1], found[2])


def _add_row(found: Capture, table: _Table, number: int, end: int) -> None:
    """Read a row, which may go on in the next lines."""
    begun = _row_start(found.lines[number], table)
    if begun is None:
        return
    name, text = begun
    if name in table.cells:
        raise found.wrong(
            f"a second row of {name}; a file is of one machine, and lines of several must not be "
            "mixed",
            number + 1,
        )
    cells, tail = _cells(text, len(table.columns))
    while len(cells) < len(table.columns) and (number := number + 1) < end:
        if _row_start(found.lines[number], table) or not _CELL.match(found.lines[number]):
            break
        text = f"{text} {found.lines[number]}"
        cells, tail = _cells(text, len(table.columns))
    table.cells[name], table.tails[name] = cells, tail


def _cells(text: str, count: int) -> tuple[list[str], list[str]]:
    """Return that many words of a row, and the words that follow."""
    found = [match for match, _ in zip(_CELL.finditer(text), range(count), strict=False)]
    return [match[1] for match in found], text[found[-1].end() if found else 0 :].split()


def _require_whole(found: Capture, table: _Table) -> None:
    """Refuse a table that lacks rows or cells, or whose cells are not below their columns."""
    if missing := [name for name in table.columns if name not in table.cells]:
        raise found.wrong(f"the table has no row of {', '.join(missing)}; it may be cut off")
    for place, name in enumerate(table.columns):
        cells = table.cells[name]
        if len(cells) < len(table.columns):
            raise found.wrong(
                f"row {name} has {len(cells)} cells for {len(table.columns)} columns; it may be "
                "cut off"
            )
        if cells[place] != "X":
            raise found.wrong(
                f"row {name}: expected X in its own column, found {shorten(cells[place])}; cells "
                "or columns are missing or joined: separate them by spaces"
            )
    if len(table.gpus) == len(table.columns) == 1:
        raise found.wrong("the table has one GPU; links join two or more")
