"""Figures of the benchmarks' reports, by heading and column."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from builders import ROOT

_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
_ROW = re.compile(r"^\|(.+)\|$")


@dataclass(frozen=True)
class Report:
    """A report of ``benchmarks/``.

    Attributes:
        name: of the file.
        text: all of it.
    """

    name: str
    text: str

    def section(self, heading: str) -> str:
        """The text below a heading, up to the next one of the same level or above.

        Raises:
            LookupError: if no heading matches the regular expression.
        """
        start = re.search(rf"^(#+) (?:{heading}).*$", self.text, re.MULTILINE)
        if start is None:
            raise LookupError(f"{self.name} has no heading {heading!r}")
        end = re.compile(rf"^#{{1,{len(start[1])}}} ", re.MULTILINE).search(self.text, start.end())
        return self.text[start.end() : end.start() if end else None]

    def says(self, heading: str, words: str) -> bool:
        """Whether a section has these words."""
        return words in self.section(heading)

    def said(self, pattern: str) -> list[float]:
        """The figures that the groups of a regular expression find first.

        Raises:
            LookupError: if it finds nothing.
        """
        found = re.search(pattern, self.text, re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.name} does not say {pattern!r}")
        return [number(group) for group in found.groups()]

    def column(
        self, heading: str, name: str, where: Mapping[str, str] | None = None, part: str = ".*"
    ) -> list[float]:
        """The figures of a column in the first table of a section that has it.

        Args:
            heading: regular expression of the section's.
            name: of the column.
            where: regular expressions that other cells of a row match as a whole, by column.
            part: regular expression whose last group, or the whole, is the figure in the cell; rows
                that it does not match are left out.

        Raises:
            LookupError: if no table of the section has these columns.
        """
        needed = {name, *(where or {})}
        for rows in _tables(self.section(heading)):
            if needed <= set(rows[0]):
                chosen = [row for row in rows if _matches(row, where or {})]
                parts = [re.search(part, row[name]) for row in chosen]
                return [number(found[found.re.groups]) for found in parts if found is not None]
        raise LookupError(f"{self.name}, {heading!r}: no table has the columns {sorted(needed)}")


def number(text: str) -> float:
    """The first number of a text.

    Raises:
        LookupError: if it has none.
    """
    found = _NUMBER.search(text)
    if found is None:
        raise LookupError(f"{text!r} has no number")
    return float(found[0].replace(",", ""))


def _matches(row: Mapping[str, str], where: Mapping[str, str]) -> bool:
    return all(re.fullmatch(pattern, row[name]) for name, pattern in where.items())


def _tables(text: str) -> list[list[dict[str, str]]]:
    """Every table with rows, as its rows by column."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [match[1] for line in block.splitlines() if (match := _ROW.match(line))]
        cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        # Of columns with one name the first counts.
        rows = [dict(reversed(list(zip(cells[0], row, strict=False)))) for row in cells[2:]]
        if rows:
            found.append(rows)
    return found


@cache
def report(name: str) -> Report:
    """Return a report of ``benchmarks/`` by the name of its file, without ``.md``."""
    return Report(f"benchmarks/{name}.md", (ROOT / "benchmarks" / f"{name}.md").read_text())
