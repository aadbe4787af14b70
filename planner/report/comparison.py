"""Planners side by side, for a terminal, for Markdown and as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from planner.comparison import Row

HEADINGS = (
    "planner",
    "stages x devices",
    "iteration",
    "over ours",
    "bubble",
    "peak memory",
    "gap to bound",
    "schedule",
)


def comparison_table(rows: Iterable[Row], title: str) -> Table:
    """One line a planner; a planner without a plan says why instead."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        words = heading in ("planner", "schedule")
        table.add_column(heading, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row_cells(row)))
    return table


def comparison_markdown(rows: Iterable[Row], title: str) -> str:
    """The same table in Markdown, with a heading."""
    lines = [f"# {title}", "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
    lines += [_line(cell.replace("|", "\\|") for cell in row_cells(row)) for row in rows]
    return "\n".join(lines) + "\n"


def comparison_data(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, seconds and bytes; null where there is no figure."""
    return [
        {
            "planner": row.planner,
            "source": row.source,
            "stages": None
            if row.stages is None
            else [
                {"layers": list(stage.layers), "devices": list(stage.devices)}
                for stage in row.stages
            ],
            "devices": row.devices,
            "schedule": row.schedule,
            **dict.fromkeys(
                ("iteration_time_s", "bubble", "peak_memory_bytes", "peak_memory_share")
            ),
            **({} if row.figures is None else row.figures._asdict()),
            "ratio": row.ratio,
            "gap": row.gap,
            "reason": row.reason,
            "planning_s": row.planning_s,
        }
        for row in rows
    ]


def row_cells(row: Row) -> list[str]:
    """A row as text, by :data:`HEADINGS`; the reason in place of the schedule if it has none."""
    shape = "-" if row.stages is None else f"{len(row.stages)} x {row.devices}"
    if row.figures is None:
        return [row.planner, shape, *["-"] * 5, row.reason or "-"]
    figures = row.figures
    return [
        row.planner,
        shape,
        format_seconds(figures.iteration_time_s),
        "-" if row.ratio is None else f"{row.ratio:.3f}",
        f"{figures.bubble:.1%}",
        f"{format_bytes(figures.peak_memory_bytes)} ({figures.peak_memory_share:.0%})",
        "-" if row.gap is None else f"{row.gap:.2%}",
        row.schedule or "-",
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
