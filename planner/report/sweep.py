"""The points of a sweep: a table, lines and plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from planner.analysis.sweep.rows import SweepRow, has_costs
from planner.analysis.sweep.run import SweepResult
from planner.costs.throughput import SECONDS_AN_HOUR, Throughput
from planner.plan.operations import compress_devices
from planner.report.summary import cost_heading, format_epoch
from planner.report.tables import Table
from planner.units import format_seconds, four_digits, plural

FRONT_MARK = "*"


def sweep_table(result: SweepResult) -> Table:
    """Return a table with one row per point; those on the Pareto front are marked."""
    columns = _columns(result)
    marks = [FRONT_MARK if row.on_front else "" for row in result.rows]
    names = [row.point.cluster for row in result.rows]
    title = f"{result.model}: {plural(len(result.rows), 'point')}"
    rows = zip(marks, names, *columns.values(), strict=True)
    return Table.of(title, ("", "cluster"), [*columns], rows)


def _columns(result: SweepResult) -> dict[str, list[str]]:
    """Return the cells below each heading; columns of figures that no row has are left out."""
    rows, currency = result.rows, result.currency
    has_groups = any(max(row.degrees or [1]) > 1 for row in rows)
    figures: dict[str, tuple[str, Callable[[Any], str], str]] = {
        **({"group": ("degrees", _group, "-")} if has_groups else {}),
        "microbatches": ("point.batch", str, "-"),
        "iteration": ("iteration_time_s", format_seconds, "no plan"),
        "per sample": ("time_per_sample_s", format_seconds, "-"),
        "samples/s": ("throughput.samples_per_s", four_digits, "-"),
        "tokens/s": ("throughput.tokens_per_s", four_digits, "-"),
        "MFU": ("throughput.mfu", lambda share: f"{share:.1%}", "-"),
        cost_heading(currency): ("cost_per_million_samples", four_digits, "no price"),
        "epoch": ("throughput.epoch_s", format_epoch, "-"),
        cost_heading(currency, "epoch"): ("throughput.cost_per_epoch", four_digits, "-"),
        "gap": ("gap", lambda share: f"{share:.2%}", "-"),
    }
    columns = {"devices": [f"{len(row.used) or '-'} of {row.point.devices}" for row in rows]}
    for heading, (name, text, missing) in figures.items():
        found = [_figure(row, name) for row in rows]
        if heading in ("iteration", "per sample") or any(figure is not None for figure in found):
            # A point without a plan has no figures; one with a plan may lack a price.
            columns[heading] = [
                text(figure)
                if figure is not None
                else missing
                if row.plan or heading == "iteration"
                else "-"
                for row, figure in zip(rows, found, strict=True)
            ]
    return columns


def _figure(row: SweepRow, name: str) -> Any:
    return None if name.startswith("throughput.") and not row.throughput else attrgetter(name)(row)


def _group(degrees: tuple[int, ...]) -> str:
    return "+".join(map(str, degrees))


def sweep_lines(result: SweepResult) -> list[str]:
    """Return lines on the Pareto front, on prices, and on points without a plan."""
    lines = []
    if result.front:
        what = "time per sample, cost per sample" if has_costs(result.rows) else "time per sample"
        lines.append(
            f"{FRONT_MARK} Pareto front: no other point is at least as good in {what} and devices "
            f"in use, and better in one"
        )
        lines += _about_costs(result)
    return [*lines, *_notes(result.rows)]


def _about_costs(result: SweepResult) -> Iterator[str]:
    if all(row.cost_per_million_samples is None for row in result.rows):
        yield (
            "no costs: the clusters have no prices; set price_per_hour on device types, nodes or "
            "devices, and currency"
        )
        return
    yield f"cost: price_per_hour / {SECONDS_AN_HOUR:g} x time, for the devices in use"
    if not has_costs(result.rows):
        yield "some plans use devices without a price, so the front compares time and devices only"


def _notes(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield the sets of devices that were chosen and the reasons for no plan, each once."""
    chosen, reasons = defaultdict(list), defaultdict(list)
    for row in rows:
        if row.chooses:
            devices = f"{plural(row.point.devices, 'device')} of {row.point.cluster}"
            chosen[f"{devices}: {compress_devices(row.chosen)}"].append(row.point.batch)
        if row.reason is not None:
            reasons[row.reason].append(str(row.point))
    yield from (f"{devices} (at {', '.join(batches)})" for devices, batches in chosen.items())
    yield from (f"no plan for {' and '.join(ps)}: {reason}" for reason, ps in reasons.items())


def sweep_data(result: SweepResult) -> dict[str, Any]:
    """Return the points as plain data; null where there is no figure."""
    return {
        "model": result.model,
        "folder": str(result.folder),
        "currency": result.currency,
        "solved": result.solved,
        "points": [_data(row) for row in result.rows],
        "open": [point._asdict() for point in result.open],
    }


def _data(row: SweepRow) -> dict[str, Any]:
    none = dict.fromkeys(field.name for field in fields(Throughput))
    left_out = ("point", "chooses", "throughput")
    return {
        **row.point._asdict(),
        **{name: value for name, value in vars(row).items() if name not in left_out},
        **{name: getattr(row, name) for name in ("samples", "gap", "time_per_sample_s")},
        "devices_used": len(row.used) or None,
        **(none if row.throughput is None else asdict(row.throughput)),
    }
