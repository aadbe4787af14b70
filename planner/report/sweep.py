"""The points of a sweep: a table, lines, plain data and a chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.analysis.sweep.rows import SweepRow, has_costs, pareto_front
from planner.analysis.sweep.run import SweepResult
from planner.costs.throughput import SECONDS_AN_HOUR, Throughput
from planner.plan.operations import compress_devices
from planner.report.figures import (
    INK_COLOUR,
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
from planner.units import TimeUnit, format_seconds, four_digits, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FRONT_MARK = "*"


def sweep_table(result: SweepResult) -> Table:
    """Return a table with one row per point; those on the Pareto front are marked."""
    rates = _rates(result)
    headings = (rate.heading for rate in rates)
    group = ["group"] if _has_groups(result) else []
    numbers = ["devices", *group, "microbatches", "iteration", "per sample", *headings, "gap"]
    title = f"{result.model}: {plural(len(result.rows), 'point')}"
    table = Table(title, ("", "cluster"), numbers)
    for row in result.rows:
        mark = FRONT_MARK if row.on_front else ""
        devices, *others = _numbers(row, rates)
        degree = [_group(row)] if group else []
        table.add_row(mark, row.point.cluster, devices, *degree, *others)
    return table


def _has_groups(result: SweepResult) -> bool:
    """Return whether any plan has tensor-parallel groups."""
    return any(row.degree not in (None, 1) for row in result.rows)


def _group(row: SweepRow) -> str:
    """Return the devices of a plan's groups: a number, or several."""
    if row.degree is None or isinstance(row.degree, int):
        return "-" if row.degree is None else str(row.degree)
    return "+".join(map(str, row.degree))


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
    return [*lines, *_choices(result.rows), *_reasons(result.rows)]


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
    fields = asdict(row)
    del fields["point"], fields["chooses"], fields["throughput"]
    rates = dict.fromkeys(field.name for field in dataclass_fields(Throughput))
    return {
        **row.point._asdict(),
        "samples": row.point.samples,
        **fields,
        "time_per_sample_s": row.time_per_sample_s,
        **(rates if row.throughput is None else asdict(row.throughput)),
        "cost_per_million_samples": row.cost_per_million_samples,
    }


class _Rate(NamedTuple):
    """A column of what iterations mean."""

    heading: str
    figure: Callable[[SweepRow], float | None]
    text: Callable[[float], str] = four_digits
    missing: str = "-"

    def cell(self, row: SweepRow) -> str:
        """Return a row's figure as text."""
        figure = self.figure(row)
        return self.missing if figure is None else self.text(figure)


def _rates(result: SweepResult) -> list[_Rate]:
    """Return the columns in which any plan has a figure; samples a second always."""
    currency = result.currency
    first, *others = (
        _Rate("samples/s", _of_throughput("samples_per_s")),
        _Rate("tokens/s", _of_throughput("tokens_per_s")),
        _Rate("MFU", _of_throughput("mfu"), lambda share: f"{share:.1%}"),
        _Rate(cost_heading(currency), lambda row: row.cost_per_million_samples, missing="no price"),
        _Rate("epoch", _of_throughput("epoch_s"), format_epoch),
        _Rate(cost_heading(currency, "epoch"), _of_throughput("cost_per_epoch")),
    )
    return [first, *(rate for rate in others if any(map(_is_known(rate), result.rows)))]


def _of_throughput(name: str) -> Callable[[SweepRow], float | None]:
    return lambda row: None if row.throughput is None else getattr(row.throughput, name)


def _is_known(rate: _Rate) -> Callable[[SweepRow], bool]:
    return lambda row: rate.figure(row) is not None


def _has_any_cost(result: SweepResult) -> bool:
    """Return whether any point has a cost."""
    return any(row.price_per_hour is not None for row in result.rows)


def _numbers(row: SweepRow, rates: Sequence[_Rate]) -> list[str]:
    point = row.point
    batch = _batch(row)
    wanted = f"- of {point.devices}"
    if row.iteration_time_s is None or row.time_per_sample_s is None:
        return [wanted, batch, "no plan", *["-"] * (len(rates) + 2)]
    return [
        f"{row.devices_used} of {point.devices}",
        batch,
        format_seconds(row.iteration_time_s),
        format_seconds(row.time_per_sample_s),
        *(rate.cell(row) for rate in rates),
        "-" if row.gap is None else f"{row.gap:.2%}",
    ]


def _about_costs(result: SweepResult) -> list[str]:
    planned = [row for row in result.rows if row.plan is not None]
    if planned and not _has_any_cost(result):
        return [
            "no costs: the clusters have no prices; set price_per_hour on device types, nodes or "
            "devices, and currency"
        ]
    lines = []
    if planned:
        paid = {
            "devices": "the devices in use",
            "machines": "all devices of every machine that has one in use",
        }[result.bill]
        lines.append(f"cost: price_per_hour / {SECONDS_AN_HOUR:g} x time, for {paid}")
    if planned and not has_costs(result.rows):
        lines.append(
            "some plans use devices without a price, so the front compares time and devices only"
        )
    return lines


def _choices(rows: tuple[SweepRow, ...]) -> list[str]:
    """Return a line for each set of devices that points with fewer devices may use."""
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
    """Return each reason once, with its points."""
    points: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            points.setdefault(row.reason, []).append(str(row.point))
    return [f"no plan for {' and '.join(where)}: {reason}" for reason, where in points.items()]


WIDTH_INCHES = 9.0
HEIGHT_INCHES = 6.0
MARKERS = "osD^vP*"
"""Beside the colours, for grey print."""
MOST_LABELS = 30


def plot_sweep(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Draw every plan of a sweep: time a sample over cost a million samples.

    Where a plan has no cost, over devices in use. Filled marks are on the front of the table (time,
    cost, devices) and say their devices and batch; the line steps along the points that are best in
    the two drawn figures alone.

    Args:
        result: of the sweep.
        ax: where to draw; default new axes on a figure of their own, outside pyplot.

    Returns:
        The axes drawn on.
    """
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        ax = new_axes(WIDTH_INCHES, HEIGHT_INCHES)
    rows = [row for row in result.rows if row.time_per_sample_s is not None]
    unit = time_unit(max((row.time_per_sample_s or 0.0 for row in rows), default=1.0))
    places = [_place(row, unit, with_costs=has_costs(result.rows)) for row in rows]
    _draw_front(ax, places)
    _draw_points(ax, rows, places)
    _draw_labels(ax, rows, places)
    costs = has_costs(result.rows)
    ax.set_xlabel(plain_text(cost_heading(result.currency)) if costs else "devices in use")
    ax.set_ylabel(f"time per sample ({unit.symbol})")
    ax.set_xlim(0.0, 1.15 * max((x for x, _ in places), default=0.0) or 1.0)
    ax.set_ylim(0.0, 1.1 * max((y for _, y in places), default=0.0) or 1.0)
    if not costs:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    bare_frame(ax, grid="both")
    ax.set_title(_title(result, rows), loc="left", fontsize="medium")
    return ax


def save_sweep_plot(result: SweepResult, path: str | Path) -> None:
    """Write :func:`plot_sweep`'s chart as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(root_figure(plot_sweep(result)), path)


def _place(row: SweepRow, unit: TimeUnit, *, with_costs: bool) -> tuple[float, float]:
    across = row.cost_per_million_samples if with_costs else row.devices_used
    return float(across or 0.0), (row.time_per_sample_s or 0.0) * unit.per_second


def _draw_front(ax: Axes, places: Sequence[tuple[float, float]]) -> None:
    """Draw the best time at each cost as a step line."""
    best = sorted({places[index] for index in pareto_front(places)})
    ax.step(
        [x for x, _ in best],
        [y for _, y in best],
        where="post",
        color=MUTED_COLOUR,
        linewidth=1.2,
        zorder=1,
    )


def _draw_points(ax: Axes, rows: Sequence[SweepRow], places: Sequence[tuple[float, float]]) -> None:
    """Draw a colour and marker per cluster; points off the front are hollow."""
    labels = list(dict.fromkeys(row.point.cluster for row in rows))
    for number, label in enumerate(labels):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        own = [index for index, row in enumerate(rows) if row.point.cluster == label]
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


def _draw_labels(ax: Axes, rows: Sequence[SweepRow], places: Sequence[tuple[float, float]]) -> None:
    best = [index for index, row in enumerate(rows) if row.on_front]
    for index in best[:MOST_LABELS]:
        row, point = rows[index], rows[index].point
        ax.annotate(
            f"{row.devices_used} dev, {point.microbatches}x{point.samples_per_microbatch}",
            places[index],
            xytext=(6, 4),
            textcoords="offset points",
            fontsize="small",
            color=INK_COLOUR,
        )


def _title(result: SweepResult, rows: Sequence[SweepRow]) -> str:
    missing = len(result.rows) - len(rows)
    lacking = f", {plural(missing, 'point')} without a plan" if missing else ""
    figures = "time, cost and devices" if has_costs(result.rows) else "time and devices"
    return plain_text(
        f"{result.model}: {plural(len(rows), 'plan')}{lacking}\nfilled: Pareto front of {figures}"
    )
