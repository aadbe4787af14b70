"""What a calibration changed, for a terminal and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.calibration.calibrate import Calibration
from planner.report.deviation import devices_cell, milliseconds
from planner.report.names import stages_label
from planner.report.tables import new_table, plain
from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def calibration_tables(calibration: Calibration) -> Group:
    """Operations, links and all-reduces before and after, notes, and the iteration time."""
    from rich.console import Group
    from rich.text import Text

    tables = []
    if calibration.times:
        tables.append(_times_table(calibration))
    if calibration.links:
        tables.append(_links_table(calibration))
    if calibration.reductions:
        tables.append(_reductions_table(calibration))
    notes = [Text(f"note: {note}") for note in calibration.notes]
    return Group(*tables, *notes, Text(calibration_line(calibration), style="bold"))


def calibration_line(calibration: Calibration) -> str:
    """The iteration time predicted before and after, and measured."""
    return (
        f"iteration {format_seconds(calibration.before_s)} predicted before, "
        f"{format_seconds(calibration.after_s)} after, "
        f"{format_seconds(calibration.measured_s)} measured"
    )


def calibration_data(calibration: Calibration) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "predicted_before_s": calibration.before_s,
        "predicted_after_s": calibration.after_s,
        "measured_s": calibration.measured_s,
        "operations": [{**asdict(row), "spread": row.spread} for row in calibration.times],
        "links": [
            {
                "index": row.index,
                "method": row.method,
                "before": row.before.model_dump(mode="json"),
                "after": row.after.model_dump(mode="json"),
            }
            for row in calibration.links
        ],
        "all_reduces": [
            {
                "stages": list(row.stages),
                "predicted_before_s": row.before.predicted_s,
                "predicted_after_s": row.after.predicted_s,
                "measured_s": row.before.measured_s,
            }
            for row in calibration.reductions
        ],
        "notes": list(calibration.notes),
    }


def _times_table(calibration: Calibration) -> Table:
    table = new_table(
        "Operations, for one microbatch",
        ("stage", "type", "devices", "kind"),
        ("samples", "predicted ms", "measured ms"),
    )
    for row in calibration.times:
        table.add_row(
            str(row.stage),
            plain(row.device_type),
            devices_cell(row.device_s),
            row.kind,
            f"{row.samples:,}",
            milliseconds(row.predicted_s),
            milliseconds(row.measured_s),
        )
    return table


def _links_table(calibration: Calibration) -> Table:
    figures = ("GB/s before", "after", "latency us before", "after")
    table = new_table("Links", ("link", "how"), figures)
    for row in calibration.links:
        table.add_row(
            plain(row.name),
            row.method,
            *(f"{link.bandwidth_gb_per_s:,.4g}" for link in (row.before, row.after)),
            *(f"{link.latency_us:,.4g}" for link in (row.before, row.after)),
        )
    return table


def _reductions_table(calibration: Calibration) -> Table:
    figures = ("predicted ms before", "after", "measured ms")
    table = new_table("All-reduces, predicted from the links", ("gradients of",), figures)
    for row in calibration.reductions:
        times_s = (row.before.predicted_s, row.after.predicted_s, row.before.measured_s)
        table.add_row(stages_label(row.stages), *map(milliseconds, times_s))
    return table
