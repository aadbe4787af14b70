"""Predicted against measured times, for a terminal and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.artifacts.names import compress_devices, stages_label
from planner.artifacts.operations import KIND_LABELS, Kind
from planner.deviation import Comparison, Deviation
from planner.report.tables import new_table, plain
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MOST_ROWS = 12
"""Of a table; the rest is counted."""
_FIGURES = ("count", "predicted ms", "measured ms", "measured / predicted")


def comparison_tables(comparison: Comparison) -> Group:
    """A table of kinds of events, one of the worst stages, one of links, and a line in all."""
    from rich.console import Group
    from rich.text import Text

    tables = [_kinds_table(comparison), _stages_table(comparison)]
    if comparison.transfers:
        tables.append(_links_table(comparison))
    return Group(*tables, Text(comparison_line(comparison), style="bold"))


def comparison_line(comparison: Comparison) -> str:
    """The iteration predicted and measured, and the error."""
    total = comparison.iteration
    error = "" if comparison.error is None else f", error {comparison.error:+.1%}"
    slept = "; operations were emulated, not computed" if comparison.emulated else ""
    return (
        f"iteration {format_seconds(total.predicted_s or 0.0)} predicted, "
        f"{format_seconds(total.measured_s or 0.0)} measured (median of "
        f"{plural(len(comparison.steps), 'step')}{_first(comparison.steps)}){error}{slept}"
    )


def _first(steps: Sequence[int]) -> str:
    return f" from step {steps[0]}" if steps[0] > 1 else ""


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """The same as plain data, every stage and link: seconds; null where there is no figure."""
    return {
        "iteration": _data(comparison.iteration),
        "error": comparison.error,
        "steps": list(comparison.steps),
        "emulated": comparison.emulated,
        "kinds": {kind: _data(row) for kind, row in comparison.kinds.items()},
        "operations": [
            {"stage": stage, "device": device, "kind": kind, **_data(row)}
            for (stage, device, kind), row in comparison.operations.items()
        ],
        "transfers": [
            {"source": source, "target": target, **_data(row)}
            for (source, target), row in comparison.transfers.items()
        ],
        "all_reduces": [
            {"stages": list(stages), **_data(row)} for stages, row in comparison.reductions.items()
        ],
        "optimizer": {device: _data(row) for device, row in comparison.optimizer.items()},
        "waiting": {device: _data(row) for device, row in comparison.waiting.items()},
    }


def _data(row: Deviation) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio}


def _kinds_table(comparison: Comparison) -> Table:
    table = new_table("Medians of all stages and devices", ("what",), _FIGURES)
    for kind, row in comparison.kinds.items():
        table.add_row(f"{kind} {KIND_LABELS[kind]}", *_cells(row))
    for stages, row in comparison.reductions.items():
        table.add_row(f"all-reduce {stages_label(stages)}", *_cells(row))
    for name, rows in (("optimizer step", comparison.optimizer), ("waiting", comparison.waiting)):
        table.add_row(f"{name}, mean of devices", *_cells(_mean(rows.values())))
    return table


def _mean(rows: Iterable[Deviation]) -> Deviation:
    every = list(rows)
    expected = [row.predicted_s for row in every if row.predicted_s is not None]
    found = [row.measured_s for row in every if row.measured_s is not None]
    return Deviation(
        len(every),
        sum(expected) / len(expected) if expected else None,
        sum(found) / len(found) if found else None,
    )


def _stages_table(comparison: Comparison) -> Table:
    """The operation of each stage and device that is furthest off, the worst first."""
    worst: dict[tuple[int, str], tuple[Kind, Deviation]] = {}
    for (stage, device, kind), row in comparison.operations.items():
        old = worst.get((stage, device))
        if old is None or row.factor > old[1].factor:
            worst[stage, device] = (kind, row)
    ranked = sorted(worst.items(), key=lambda item: -item[1][1].factor)
    table = new_table("Furthest off, by stage and device", ("stage", "device", "what"), _FIGURES)
    for (stage, device), (kind, row) in ranked[:MOST_ROWS]:
        table.add_row(str(stage), plain(device), f"{kind} {KIND_LABELS[kind]}", *_cells(row))
    _tell_rest(table, len(ranked))
    return table


def _links_table(comparison: Comparison) -> Table:
    table = new_table("Transfers, from ready to received", ("from", "to"), _FIGURES)
    ranked = sorted(comparison.transfers.items(), key=lambda item: -item[1].factor)
    for (source, target), row in ranked[:MOST_ROWS]:
        table.add_row(plain(source), plain(target), *_cells(row))
    _tell_rest(table, len(ranked))
    return table


def _tell_rest(table: Table, count: int) -> None:
    if count > MOST_ROWS:
        table.caption = f"and {count - MOST_ROWS:,} less far off; --json has all"
        table.caption_justify = "left"


def _cells(row: Deviation) -> tuple[str, str, str, str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return (f"{row.count:,}", milliseconds(row.predicted_s), milliseconds(row.measured_s), ratio)


def milliseconds(seconds: float | None) -> str:
    """A cell; a dash where there is no figure."""
    return "-" if seconds is None else f"{seconds * 1e3:,.3f}"


def devices_cell(names: Iterable[str]) -> str:
    """Device names in one cell."""
    return plain(compress_devices(names))
