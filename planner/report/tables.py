"""Tables of text that terminals, Markdown and the HTML page show alike."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from planner.simulation.timeline import Timeline
from planner.units import plural

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NARROWEST_HEADING = 7
"""Headings of numbers are broken into lines of at least so many characters."""


@dataclass
class Table:
    """Columns of words, then columns of numbers; cells are plain text.

    Attributes:
        title: above the table.
        words: headings of the first columns, whose cells may be folded.
        numbers: headings of the other columns, which are aligned to the right and never folded.
        note: below the table; empty for none.
        rows: of cells, one for each heading.
    """

    title: str
    words: Sequence[str]
    numbers: Sequence[str] = ()
    note: str = ""
    rows: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def headings(self) -> list[str]:
        """All headings, from left to right."""
        return [*self.words, *self.numbers]

    @classmethod
    def of(
        cls, title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Iterable[str]]
    ) -> Table:
        """Return a table with all its rows.

        Raises:
            ValueError: if a row has not one cell for each heading.
        """
        table = cls(title, words, numbers, rows=[tuple(row) for row in rows])
        for row in table.rows:
            if len(row) != len(table.headings):
                raise ValueError(f"{title}: {len(row)} cells for {len(table.headings)} columns")
        return table

    def markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        rules = ["---"] * len(self.words) + ["---:"] * len(self.numbers)
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.headings, rules, *rows))

    def __rich__(self) -> RichTable:
        """Return the table as rich prints it, within 80 columns where words can be folded."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, "bold"),
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for heading in self.words:
            table.add_column(Text(heading), overflow="fold")
        for place, heading in enumerate(self.numbers, len(self.words)):
            width = max([NARROWEST_HEADING, *(len(row[place]) for row in self.rows)])
            lines = textwrap.fill(heading, width, break_long_words=False, break_on_hyphens=False)
            table.add_column(Text(lines), justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


View: TypeAlias = Sequence[Table | str]
"""What is shown of one thing: tables, and lines of text between them."""


def common_prefix(names: Iterable[str]) -> str:
    """Return the dotted prefix that most names have, such as ``model.``; empty if none has one.

    Without it, all names still differ, and none starts with a digit.
    """
    every = set(names)
    counts = Counter(
        name[: place + 1] for name in every for place, letter in enumerate(name) if letter == "."
    )
    for prefix in sorted(counts, key=len, reverse=True):
        short = {name.removeprefix(prefix) for name in every}
        if 2 * counts[prefix] > len(every) == len(short) and not any(
            n[:1].isdigit() for n in short
        ):
            return prefix
    return ""


def problem_title(timeline: Timeline) -> str:
    """Return the model, the cluster and the size of the pipeline on one line."""
    pipeline = timeline.pipeline
    parts = (
        plural(len(pipeline.stages), "stage"),
        plural(len(pipeline.devices), "device"),
        plural(pipeline.microbatches, "microbatch", "es"),
    )
    return f"{pipeline.problem.graph.name} on {pipeline.problem.cluster.name}: {', '.join(parts)}"
