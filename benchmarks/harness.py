"""What all benchmarks share: sections of rows and claims, as Markdown and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from planner import PipeplanError

Row = dict[str, Any]
"""A row of a table by column. Names say the unit: ``ms``, ``s``, ``MiB`` or ``%``."""
CLAIM_COLUMNS = ("claim", "who says so", "bar", "ours", "verdict")


@dataclass(frozen=True)
class Claim:
    """A figure, and the bar that a paper, another program or ourselves set for it.

    Attributes:
        text: what is claimed, and on what it was measured.
        figure: ours; None if nothing could be measured.
        source: who sets the bar.
        at_least, at_most: the bar; without one the figure is only reported.
        unit: of figure and bar, such as ``%`` or ``of 12``; empty for ratios.
    """

    text: str
    figure: float | None
    source: str = "ourselves"
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def is_reached(self) -> bool | None:
        """Whether the figure reaches the bar; None without a bar or a figure."""
        if self.figure is None or (self.at_least is None and self.at_most is None):
            return None
        above = self.at_least is None or self.figure >= self.at_least
        return above and (self.at_most is None or self.figure <= self.at_most)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the claim in a table with :data:`CLAIM_COLUMNS`."""
        sign, bar = (">=", self.at_least) if self.at_most is None else ("<=", self.at_most)
        shown = "-" if bar is None else f"{sign} {self._shown(bar)}"
        verdict = {None: "no bar", True: "reached", False: "**not reached**"}[self.is_reached]
        if self.figure is None:
            return (self.text, self.source, shown, "-", "not measured")
        return (self.text, self.source, shown, self._shown(self.figure), verdict)

    def _shown(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".strip()


def counted(text: str, verdicts: Iterable[bool], source: str = "ourselves") -> Claim:
    """Return the claim that something holds of every instance."""
    found = list(verdicts)
    count = len(found)
    return Claim(text, sum(found) if found else None, source, at_least=count, unit=f"of {count}")


@dataclass(frozen=True)
class Result:
    """What a section found.

    Attributes:
        rows: of its table, all with the same columns.
        claims: that follow from the rows.
    """

    rows: Sequence[Row]
    claims: Sequence[Claim] = ()


Section = Callable[[argparse.Namespace], Result]
"""Runs a section; the first line of its docstring is the title."""


def run(
    name: str,
    about: str | None,
    sections: Mapping[str, Section],
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """Run the sections that the command line names; return the exit status.

    Args:
        name: of the module, after ``python -m``.
        about: its docstring.
        sections: by the names that ``--rows`` takes.
        more: adds further options.
    """
    options = _options(name, about, sections, more)
    command = shlex.join(["python", "-m", name, *_public(sys.argv[1:])])
    print(heading(name.rpartition(".")[2], command), flush=True)
    try:
        for section in chosen(options.rows, sections):
            begin_s = time.monotonic()
            result = sections[section](options)
            if options.output is not None:
                save(options.output, section, command, result)
            print(markdown(sections[section], result), flush=True)
            tell(f"{section}: {time.monotonic() - begin_s:.0f} s")
    except PipeplanError as error:
        tell("\n".join(error.problems))
        return 1
    return 0


def _options(
    name: str,
    about: str | None,
    sections: Mapping[str, Section],
    more: Callable[[argparse.ArgumentParser], None],
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", help=f"sections, separated by commas: {', '.join(sections)}")
    parser.add_argument("--short", action="store_true", help="the same bars on a few instances")
    parser.add_argument("--data", type=data_folder, help="folder of the public instances")
    parser.add_argument("--output", type=Path, metavar="FILE", help="save rows and claims as JSON")
    more(parser)
    return parser.parse_args()


def _public(words: Sequence[str]) -> list[str]:
    """Return the words of a command without this machine's folders."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        if not {"--output", "--keep"} & {before, word}:
            shown.append("FOLDER" if before in ("--data", "--published") else word)
    return shown


def chosen(rows: str | None, sections: Iterable[str]) -> list[str]:
    """Return the sections that ``--rows`` names, all of them without it.

    Raises:
        PipeplanError: naming the unknown ones.
    """
    known = list(sections)
    names = rows.split(",") if rows else known
    unknown = ", ".join(name for name in names if name not in known)
    if unknown:
        raise PipeplanError(f"--rows: {unknown} is not known; choose from {', '.join(known)}")
    return names


def data_folder(text: str) -> Path:
    """Return the folder that an option names.

    Raises:
        ArgumentTypeError: if it does not exist.
    """
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return Path(text)


def save(path: Path, section: str, command: str, result: Result) -> None:
    """Write a section's rows and claims to a JSON file, beside the sections that it has."""
    known = json.loads(path.read_text()) if path.exists() else {}
    claims = [asdict(claim) for claim in result.claims]
    known[section] = {"command": command, "machine": machine(), "claims": claims}
    known[section]["rows"] = list(result.rows)
    path.write_text(json.dumps(known, indent=1) + "\n")


# --- Markdown -------------------------------------------------------------------------------------


def heading(title: str, command: str) -> str:
    """Return a title with the command, the machine and the date."""
    return f"# {title}\n\nMade by `{command}` on {machine()}.\n"


def machine() -> str:
    """Return today's date, the machine and the versions of what runs on it."""
    packages = {name: metadata.version(name) for name in ("pipeplan", "torch", "ortools")}
    versions = {"Python": platform.python_version(), **packages}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"{date}; {os.cpu_count()} cores, {platform.machine()}, {told}"


def markdown(section: Section, result: Result) -> str:
    """Return the title of a section, its claims and its table."""
    parts = [f"## {(section.__doc__ or '').splitlines()[0].rstrip('.')}\n"]
    if result.claims:
        parts.append(table(CLAIM_COLUMNS, [claim.cells for claim in result.claims]))
    if result.rows:
        columns = list(result.rows[0])
        rows = [[shown(row[name]) for name in columns] for row in result.rows]
        parts.append(table(columns, rows))
    return "\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """Return a cell: numbers with four digits, and nothing as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def tell(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)
