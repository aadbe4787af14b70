"""The points of a sweep: a table, lines, plain data and a chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.analysis.sweep.rows import SweepRow, has_costs, pareto_front
from planner.analysis.sweep.run import SweepResult
from planner.costs.throughput import SECONDS_AN_HOUR, Throughput
from planner.plan.operations import compress_devices
from planner.report.figures import (
    LINE_COLOURS,
    MUTED_COLOUR,
    bare_frame,
    new_axes,
    plain_text,
    require_format,
    root_figure,
    save_figure,
)
from planner.report.summary import cost_heading, format_epoch
from planner.report.tables import Table
from planner.units import format_seconds, four_digits, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONT_MARK = "*"
WIDTH_INCHES = 9.0
HEIGHT_INCHES = 6.0
MARKERS = "osD^vP*"
"""Beside the colours, for grey print."""
PAID_FOR = {
    "devices": "the devices in use",
    "machines": "all devices of every machine that has one in use",
}


def sweep_table(result: SweepResult) -> Table:
    """Return a table with one row per point; those on the Pareto front are marked."""
    rows, columns = result.rows, _columns(result)
    title = f"{result.model}: {plural(len(rows), 'point')}"
    table = Table(title, ("", "cluster"), [*columns])
    for row, *cells in zip(rows, *columns.values(), strict=True):
        table.add_row(FRONT_MARK if row.on_front else "", row.cluster, *cells)
    return table


def _columns(result: SweepResult) -> dict[str, list[str]]:
    """Return the cells below each heading; columns of figures that no row has are left out."""
    rows, currency = result.rows, result.currency
    has_groups = any(row.degree not in (None, 1) for row in rows)
    figures: dict[str, tuple[str, Callable[[Any], str], str]] = {
        **({"group": ("degree", _group, "-")} if has_groups else {}),
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
    columns = {"devices": [f"{row.devices_used or '-'} of {row.devices}" for row in rows]}
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


def _group(degree: int | tuple[int, ...]) -> str:
    return str(degree) if isinstance(degree, int) else "+".join(map(str, degree))


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
    yield f"cost: price_per_hour / {SECONDS_AN_HOUR:g} x time, for {PAID_FOR[result.bill]}"
    if not has_costs(result.rows):
        yield "some plans use devices without a price, so the front compares time and devices only"


def _notes(rows: Sequence[SweepRow]) -> Iterator[str]:
    """Yield the sets of devices that were chosen and the reasons for no plan, each once."""
    chosen, reasons = defaultdict(list), defaultdict(list)
    for row in rows:
        if row.chooses:
            devices = f"{plural(row.devices, 'device')} of {row.cluster}"
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
        "bill": result.bill,
        "currency": result.currency,
        "solved": result.solved,
        "points": [_data(row) for row in result.rows],
        "open": [point._asdict() for point in result.open],
    }


def _data(row: SweepRow) -> dict[str, Any]:
    names = ("samples", "gap", "devices_used", "time_per_sample_s")
    none = dict.fromkeys(field.name for field in fields(Throughput))
    return {
        **row.model_dump(mode="json", exclude={"chooses", "throughput"}),
        **{name: getattr(row, name) for name in names},
        **(none if row.throughput is None else asdict(row.throughput)),
    }


def plot_sweep(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Draw every plan of a sweep: time a sample over cost a million samples.

    If a plan has no cost, the chart is over devices in use. Filled marks are on the front of the
    table (time, cost, devices); the line steps along the points that are best in the two drawn
    figures alone.

    Args:
        result: of the sweep.
        ax: where to draw; default new axes on a figure of their own, outside pyplot.

    Returns:
        The axes drawn on.
    """
    ax = ax or new_axes(WIDTH_INCHES, HEIGHT_INCHES)
    costs = has_costs(result.rows)
    across = attrgetter("cost_per_million_samples" if costs else "devices_used")
    rows = [row for row in result.rows if row.plan is not None]
    unit = time_unit(max((row.time_per_sample_s or 0.0 for row in rows), default=1.0))
    places = [(across(row), (row.time_per_sample_s or 0.0) * unit.per_second) for row in rows]
    best = sorted({places[index] for index in pareto_front(places)})
    ax.step([x for x, _ in best], [y for _, y in best], where="post", color=MUTED_COLOUR, zorder=1)
    _draw_points(ax, rows, places)
    ax.set_xlabel(plain_text(cost_heading(result.currency)) if costs else "devices in use")
    ax.set_ylabel(f"time per sample ({unit.symbol})")
    ax.set_xlim(left=0.0)
    ax.set_ylim(bottom=0.0)
    ax.locator_params("x", integer=not costs)
    bare_frame(ax, grid="both")
    title = f"{result.model}: {plural(len(rows), 'plan')}; filled: Pareto front"
    ax.set_title(plain_text(title), loc="left", fontsize="medium")
    return ax


def save_sweep_plot(result: SweepResult, path: str | Path) -> None:
    """Write :func:`plot_sweep`'s chart as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(root_figure(plot_sweep(result)), path)


def _draw_points(ax: Axes, rows: Sequence[SweepRow], places: Sequence[tuple[float, float]]) -> None:
    """Draw a colour and marker per cluster; points off the front are hollow."""
    labels = list(dict.fromkeys(row.cluster for row in rows))
    for number, label in enumerate(labels):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        own = [index for index, row in enumerate(rows) if row.cluster == label]
        ax.scatter(
            [places[index][0] for index in own],
            [places[index][1] for index in own],
            marker=MARKERS[number % len(MARKERS)],
            s=42,
            edgecolors=colour,
            facecolors=[colour if rows[index].on_front else "white" for index in own],
            label=plain_text(label),
            zorder=2,
        )
    if len(labels) > 1:
        ax.legend(frameon=False)
