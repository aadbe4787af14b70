"""The structure as a table, each number beside its bar."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.reporting.report import table
from benchmarks.structure.definitions import Lengths
from benchmarks.structure.measure import Structure
from benchmarks.structure.sources import Size

BARS = {
    "planner": "about 45,000 / 300",
    "executor": "15,500 / 110, at most 6 loose",
    "one importer": "at most 100",
    "cycles": "0",
    "way": "14",
    "classes": "0",
    "lengths": "median and p90 at most 10 / 25",
    "docstrings": "0",
}
NO_BAR = "-"


def render(structure: Structure) -> str:
    """Return a Markdown table."""
    return table(("what", "now", "bar"), list(_rows(structure)))


def _rows(structure: Structure) -> Iterator[tuple[str, str, str]]:
    for folder, size in structure.sizes.items():
        loose = folder == "executor"
        yield f"lines in {folder}/, files", _size(size, loose), BARS.get(folder, NO_BAR)
    one = f"{len(structure.with_one_importer)} of {structure.modules}"
    yield "modules with exactly one importer", one, BARS["one importer"]
    yield "import cycles between modules", _cycles(structure), BARS["cycles"]
    for backward in ("whole", "split"):
        way = structure.ways.get(backward)
        count = "not measured" if way is None else str(len(way))
        yield f"files on a microbatch's way, {backward} backward", count, BARS["way"]
    classes = str(len(structure.ambiguous_classes))
    yield "class names with two meanings", classes, BARS["classes"]
    for folder, lengths in structure.function_lengths.items():
        bar = NO_BAR if folder == "benchmarks" else BARS["lengths"]
        yield f"function length in {folder}/, median / p90 / longest", _lengths(lengths), bar
    docstrings = str(len(structure.continued_docstrings))
    yield "docstrings that continue an identifier", docstrings, BARS["docstrings"]


def _size(size: Size, loose: bool) -> str:
    text = f"{size.lines:,} / {size.files}"
    return f"{text}, {size.loose} loose" if loose else text


def _cycles(structure: Structure) -> str:
    sizes = [str(len(cycle)) for cycle in structure.cycles]
    return f"{len(sizes)}, of {', '.join(sizes)} modules" if sizes else "0"


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.median:g} / {lengths.ninetieth_percentile:g} / {lengths.longest}"
