"""What a benchmark says in a form for programs: claims with their bars, tables, what is left out.

A benchmark's short form writes one JSON line an entry with ``--claims FILE``, as each is known:
one that fails or is stopped leaves what it has. :mod:`benchmarks.report_all` makes a page of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from benchmarks.reporting.report import table
from planner import PipeplanError
from planner.records.document import Record

REACHED, MISSED, TOLD = "reached", "**not reached**", "no bar"
COLUMNS = ("claim", "who says so", "bar", "ours", "verdict")
NEEDS_DATA = "needs --data"


class Claim(Record):
    """A figure of a paper, a peer or ourselves, the bar it sets, and what we found.

    Attributes:
        claim: what is claimed.
        source: the paper or peer and what it says, or whose bar it is.
        regime: on what it was measured.
        sense, bar: what has to be reached; without a bar the figure is told only.
        figure: ours; None: there is none, and ``note`` or ``not_run`` says why.
        unit: of both: ``%`` (figures are shares then), ``s``, ``of 12``; none for ratios.
        note: what reached it, its spread, or why it was not reached.
        not_run: why nothing was measured, if so.
        reached: follows from the others; None without a bar or a run.
    """

    kind: Literal["claim"] = "claim"
    claim: str
    source: str
    regime: str = ""
    sense: Literal["at least", "at most", "below"] = "at least"
    bar: float | None = None
    figure: float | None = None
    unit: str = ""
    note: str = ""
    not_run: str = ""
    reached: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_verdict(cls, data: Any) -> Any:
        """A claim is not told apart from its figures: a line that says otherwise is refused."""
        if not isinstance(data, dict):
            return data
        rest = {name: value for name, value in data.items() if name != "reached"}
        found = _is_reached(rest)
        if data.get("reached", found) != found:
            raise ValueError(f"reached: {data['reached']}, but bar and figure say {found}")
        return {**rest, "reached": found}

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.not_run:
            return f"not run: {self.not_run}"
        if self.reached is None:
            return TOLD
        return REACHED if self.reached else MISSED

    @property
    def bar_cell(self) -> str:
        """Sense and bar."""
        sign = {"at least": ">=", "at most": "<=", "below": "<"}[self.sense]
        return "-" if self.bar is None else f"{sign} {_shown(self.bar, self.unit)}"

    @property
    def figure_cell(self) -> str:
        """Ours."""
        return "-" if self.figure is None else _shown(self.figure, self.unit)

    @property
    def cells(self) -> tuple[str, ...]:
        """The claim's cells, in the order of :data:`COLUMNS`."""
        return (self.claim, self.source, self.bar_cell, self.figure_cell, self.verdict)


def _is_reached(data: dict[str, Any]) -> bool | None:
    bar, figure = data.get("bar"), data.get("figure")
    if data.get("not_run") or not isinstance(bar, int | float):
        return None
    if not isinstance(figure, int | float):
        return False
    sense = data.get("sense", "at least")
    if sense == "below":
        return figure < bar
    return figure >= bar if sense == "at least" else figure <= bar


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.3g}%"
    return f"{value:.3g} s" if unit == "s" else f"{value:.4g} {unit}".strip()


class Details(Record):
    """A table below the claims: the instances that they were measured on."""

    kind: Literal["details"] = "details"
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class LeftOut(Record):
    """A part of the full benchmark that the short form omits."""

    kind: Literal["left_out"] = "left_out"
    text: str


Entry = Claim | Details | LeftOut
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def details(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Details:
    """A table of anything that can be told as a string."""
    cells = tuple(tuple(str(cell) for cell in row) for row in rows)
    return Details(title=title, columns=tuple(columns), rows=cells)


def met(claim: str, source: str, count: int, total: int, **more: Any) -> Claim:
    """Return a claim about the number of instances that satisfy it; no instances show nothing."""
    if not total:
        return Claim(claim=claim, source=source, not_run="no instance", **more)
    return Claim(claim=claim, source=source, bar=total, figure=count, unit=f"of {total}", **more)


def without_data(claim: str, source: str) -> Claim:
    """A claim on public instances whose folder was not given."""
    return Claim(claim=claim, source=source, not_run=NEEDS_DATA)


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The lines of a file; none if there is no file. A last line without an end does not count.

    Raises:
        PipeplanError: naming the line that is no entry.
    """
    if not path.exists():
        return ()
    whole = path.read_text().rpartition("\n")[0]
    return tuple(_entry(line, f"{path.name}:{n}") for n, line in enumerate(whole.splitlines(), 1))


def _entry(line: str, where: str) -> Entry:
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise PipeplanError(
            f"{where}: {told}; expected an entry of benchmarks.reporting.claims"
        ) from None


def add_claims_option(parser: argparse.ArgumentParser) -> None:
    """``--claims``, which every benchmark has."""
    parser.add_argument(
        "--claims", type=Path, metavar="FILE", help="write claims to this file, as JSON lines"
    )


def add_short_options(parser: argparse.ArgumentParser) -> None:
    """``--short`` and, for it alone, ``--claims``."""
    parser.add_argument("--short", action="store_true", help="the same bars on a few instances")
    add_claims_option(parser)


def is_short(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Return whether the short form is requested; exit if ``--claims`` is given without it."""
    if options.claims is not None and not options.short:
        parser.error("--claims goes with --short")
    return bool(options.short)


def tell(entries: Iterable[Entry], path: Path | None, *, as_json: bool = False) -> None:
    """Write entries as they come: to a file, and printed as JSON lines or at the end as Markdown.

    Args:
        entries: made one by one.
        path: gets JSON lines; None: none.
        as_json: print JSON lines; otherwise Markdown unless there is a file.
    """
    if path is not None:
        begin(path)
    found = list(written(entries, path, sys.stdout if as_json else None))
    if not as_json and path is None:
        print(markdown(found))


def begin(path: Path) -> None:
    """An empty file, so that claims of an earlier run do not count for this one.

    Raises:
        PipeplanError: if it cannot be written.
    """
    try:
        path.write_text("")
    except OSError as error:
        raise PipeplanError(f"--claims {path}: cannot be written: {error.strerror}") from None


def append(entries: Iterable[Entry], path: Path) -> None:
    """Write entries at the end of a file that :func:`begin` began."""
    for _ in written(entries, path, None):
        pass


def written(entries: Iterable[Entry], path: Path | None, also: TextIO | None) -> Iterator[Entry]:
    """Every entry, once it is at the end of the file; claims are told on standard error too."""
    with ExitStack() as stack:
        files = [] if path is None else [stack.enter_context(path.open("a"))]
        for entry in entries:
            for file in (*files, *([] if also is None else [also])):
                print(entry.model_dump_json(), file=file, flush=True)
            if isinstance(entry, Claim):
                told = f"{entry.claim}: {entry.figure_cell} ({entry.bar_cell}), {entry.verdict}"
                print(told, file=sys.stderr, flush=True)
            yield entry


def markdown(entries: Iterable[Entry]) -> str:
    """Claims with regimes and notes, then tables, then what is left out."""
    known = list(entries)
    claims = [entry for entry in known if isinstance(entry, Claim)]
    parts = []
    if claims:
        columns = (COLUMNS[0], "on", *COLUMNS[2:], "note")
        rows = [(c.claim, c.regime, *c.cells[2:], c.note) for c in claims]
        parts.append(_safe_table(columns, rows))
    for entry in known:
        if isinstance(entry, Details):
            parts.append(f"{entry.title}:\n\n{_safe_table(entry.columns, entry.rows)}")
    left = [entry.text for entry in known if isinstance(entry, LeftOut)]
    if left:
        parts.append("Left out here: " + "; ".join(left) + ".\n")
    return "\n".join(parts)


def _safe_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose cells may have bars and ends of lines."""
    return table(tuple(columns), [[cell_of(cell) for cell in row] for row in rows])


def cell_of(text: str) -> str:
    """Text that stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")
