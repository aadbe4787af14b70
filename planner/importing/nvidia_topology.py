"""What ``nvidia-smi topo -m`` prints: how the GPUs of a machine are joined, by classes.

The table has a row and a column for every GPU and network card, and a class where they meet. A
class tells a kind of connection, no figure, so that every link of the cluster is assumed: NVLink by
the number of links that are bonded, anything else as PCIe (:data:`_CLASSES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from planner.artifacts.document import read_text
from planner.errors import PipeplanError, shorten

_STYLES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV([1-9]|[12]\d|3[0-6])")  # No GPU has more than 18 yet.
_NAMED = re.compile(r"^\s*GPU (\d+): (.+?) \(UUID: ")
"""A line of ``nvidia-smi -L``, which may stand in the same file."""
OLDER_NAMES = {"SOC": "SYS"}
"""Of drivers before 2018."""
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first; ``NV#`` besides."""
SELF = "X"

Pair = tuple[int, int]


@dataclass(frozen=True)
class Topology:
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
    """Whether a file begins, or goes on soon, with such a table."""
    return any(_is_header(_words(line)) for line in head.splitlines())


def read_topology(path: Path) -> Topology:
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
            f"{', '.join(cards[:4])}{' and more' if len(cards) > 4 else ''} lead to other "
            "machines, of which the table tells nothing: join them by [[links]] of your own"
        )
    numa = {gpu: row[len(columns) + 1] for gpu, row in rows.items() if _tells_numa(row, columns)}
    return Topology(gpus, classes, numa, _names(lines), tuple(notes))


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


def _tells_numa(row: Sequence[str], columns: Sequence[str]) -> bool:
    return len(row) > len(columns) + 1 and row[len(columns) + 1].isdigit()


def _names(lines: Sequence[str]) -> dict[int, str]:
    found = (_NAMED.match(line) for line in lines)
    return {int(match[1]): match[2] for match in found if match is not None}


def nvlinks(word: str) -> int:
    """How many NVLinks a class bonds; 0 of the others."""
    found = _NVLINK.fullmatch(word)
    return int(found[1]) if found else 0
