"""The points of a sweep, as a table, a few lines and plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.artifacts.names import compress_devices
from planner.report.tables import new_table, plain
from planner.sweeping.rows import SECONDS_AN_HOUR, SweepRow, has_costs
from planner.sweeping.run import SweepResult
from planner.units import format_seconds, four_digits, plural

if TYPE_CHECKING:
    from rich.table import Table

FRONT_MARK = "*"


def sweep_table(result: SweepResult) -> Table:
    """One line a point, those on the front marked."""
    numbers = ["devices", "microbatches", "iteration", "a sample", "samples/s", "gap"]
    if _tells_costs(result):
        numbers[-1:-1] = [plain(cost_heading(result.currency))]
    title = plain(f"{result.model}: {plural(len(result.rows), 'point')}")
    table = new_table(title, ("", "cluster"), numbers)
    for row in result.rows:
        mark = FRONT_MARK if row.on_front else ""
        table.add_row(mark, plain(row.point.cluster), *_numbers(row, _tells_costs(result)))
    return table


def cost_heading(currency: str | None) -> str:
    """What a column or an axis of costs says."""
    return f"{currency} a million samples" if currency else "cost a million samples"


def sweep_lines(result: SweepResult) -> list[str]:
    """What the mark means, what is paid for, and why points have no plan."""
    lines = []
    if result.front:
        what = "a sample, in cost a sample" if has_costs(result.rows) else "a sample"
        lines.append(
            f"{FRONT_MARK} no other point is at least as good in time {what} and in devices in "
            "use, and better in one"
        )
    lines += _about_costs(result)
    return [*lines, *_choices(result.rows), *_reasons(result.rows)]


def sweep_data(result: SweepResult) -> dict[str, Any]:
    """The same for programs; null where there is no figure."""
    return {
        "model": result.model,
        "folder": str(result.folder),
        "bill": result.bill,
        "currency": result.currency,
        "solved": result.solved,
        "points": [_data(row) for row in result.rows],
        "open": [point._asdict() for point in result.open],
    }


def _data(row: SweepRow) -> dict[str, Any]:
    fields = asdict(row)
    del fields["point"], fields["chooses"]
    return {
        **row.point._asdict(),
        "samples": row.point.samples,
        **fields,
        "time_per_sample_s": row.time_per_sample_s,
        "samples_per_s": row.samples_per_s,
        "cost_per_million_samples": row.cost_per_million_samples,
    }


def _tells_costs(result: SweepResult) -> bool:
    """Whether any point has a cost."""
    return any(row.price_per_hour is not None for row in result.rows)


def _numbers(row: SweepRow, tells_costs: bool) -> list[str]:
    point = row.point
    batch = _batch(row)
    asked = f"- of {point.devices}"
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return [asked, batch, "no plan", *["-"] * (4 if tells_costs else 3)]
    cost = row.cost_per_million_samples
    return [
        f"{row.devices_used} of {point.devices}",
        batch,
        format_seconds(row.iteration_time_s),
        format_seconds(row.time_per_sample_s),
        "-" if row.samples_per_s is None else four_digits(row.samples_per_s),
        *(["no price" if cost is None else four_digits(cost)] if tells_costs else []),
        "-" if row.gap is None else f"{row.gap:.2%}",
    ]


def _about_costs(result: SweepResult) -> list[str]:
    planned = [row for row in result.rows if row.plan is not None]
    if planned and not _tells_costs(result):
        return [
            "no costs: the clusters have no prices; give price_per_hour of device types, nodes or "
            "devices, and currency"
        ]
    lines = []
    if planned:
        paid = {
            "devices": "the devices in use; --bill machines counts whole machines",
            "machines": "all devices of every machine that has one in use",
        }[result.bill]
        lines.append(f"cost: price_per_hour / {SECONDS_AN_HOUR:g} x time, of {paid}")
    if planned and not has_costs(result.rows):
        lines.append(
            "some plans use devices without a price: the mark is of time a sample and devices only"
        )
    return lines


def _choices(rows: tuple[SweepRow, ...]) -> list[str]:
    """Which devices points of fewer could use, in a line for each set."""
    sets: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        if row.chosen and row.chooses:
            key = (row.point.cluster, row.point.devices, compress_devices(row.chosen))
            sets.setdefault(key, []).append(_batch(row))
    return [
        f"{plural(number, 'device')} of {cluster}: {devices} (at {', '.join(batches)})"
        for (cluster, number, devices), batches in sets.items()
    ]


def _batch(row: SweepRow) -> str:
    return f"{row.point.microbatches} x {row.point.samples_per_microbatch}"


def _reasons(rows: tuple[SweepRow, ...]) -> list[str]:
    """Each once, with the points that it holds for."""
    points: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            points.setdefault(row.reason, []).append(str(row.point))
    return [f"no plan at {' and '.join(where)}: {reason}" for reason, where in points.items()]
