"""The points of a sweep in a plane: time a sample over cost, or over devices without prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.report.figures import (
    bare_frame,
    new_axes,
    plain,
    require_format,
    root_figure,
    save_figure,
)
from planner.report.palette import INK_COLOUR, LINE_COLOURS, MUTED_COLOUR
from planner.report.sweep import cost_heading
from planner.sweeping.front import pareto_front
from planner.sweeping.rows import SweepRow, has_costs
from planner.sweeping.run import SweepResult
from planner.units import TimeUnit, plural, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    ax.set_xlabel(plain(cost_heading(result.currency)) if costs else "devices in use")
    ax.set_ylabel(f"time a sample ({unit.symbol})")
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
    """What can be had for so much: the best time so far, from the left to the right."""
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
    """A colour and a mark for each cluster; hollow what is not on the front."""
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
            label=plain(label),
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
    return plain(
        f"{result.model}: {plural(len(rows), 'plan')}{lacking}\n"
        f"filled: no other plan is as good in {figures} together"
    )
