"""Memory over time: one line per device, with the devices' capacities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.plan.operations import stages_label
from planner.report.figures import (
    LINE_COLOURS,
    MUTED_COLOUR,
    bare_frame,
    chart_rows,
    new_axes,
    plain_text,
    require_format,
    root_figure,
    save_figure,
)
from planner.report.tables import problem_title
from planner.units import SizeUnit, TimeUnit, format_bytes, size_unit, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from planner.simulation.timeline import Timeline

WIDTH_INCHES = 13.0
HEIGHT_INCHES = 6.5
# With more devices than this the legend names only the first and the last.
MOST_NAMES = 24
LINE_STYLES = ("solid", "dashdot", "dotted")  # Dashed lines are capacities.
# A capacity further above the highest peak than this factor would flatten every line.
FURTHEST_CAPACITY = 3.0


def plot_memory(timeline: Timeline, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw the memory each device uses over one iteration as steps, in the unit that fits.

    Of many devices the replicas of a stage share a line. Dashed lines are the capacities of the
    device types in use; one far above all peaks is told in words at the upper edge. The time axis
    is in s, ms or µs, as its label says.

    Args:
        timeline: what the simulator returned.
        ax: where to draw; default new axes on a figure of their own, outside pyplot.
        title: first line of the title; default the model, the cluster and the pipeline's size.

    Returns:
        The axes drawn on; the first lines are the devices', in pipeline order.
    """
    if ax is None:
        ax = new_axes(WIDTH_INCHES, HEIGHT_INCHES)
    unit = time_unit(timeline.iteration_time_s)
    size = size_unit(max(timeline.peak_memory_bytes.values()))
    _draw_devices(ax, timeline, unit, size)
    _draw_capacities(ax, timeline, size)
    end = timeline.iteration_time_s * unit.per_second
    ax.set_xlim(0.0, end if end > 0 else 1.0)
    ax.set_xlabel(f"time ({unit.symbol})")
    ax.set_ylabel(f"memory in use ({size.symbol})")
    bare_frame(ax, grid="both")
    heading = plain_text(title or problem_title(timeline))
    ax.set_title(f"{heading}\n{_fullest(timeline)}", loc="left", fontsize="medium")
    _draw_legend(ax, timeline)
    return ax


def save_memory(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Write :func:`plot_memory`'s chart as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(root_figure(plot_memory(timeline, title=title)), path)


def _draw_devices(ax: Axes, timeline: Timeline, unit: TimeUnit, size: SizeUnit) -> None:
    """Draw steps up to the end of the iteration."""
    stages_on, rows = timeline.pipeline.stages_on, chart_rows(timeline)
    for (device, name), (colour, style) in zip(rows.items(), _looks(len(rows)), strict=True):
        steps = timeline.memory[device]
        times = [time for time, _ in steps] + [timeline.iteration_time_s]
        held = [bytes_ for _, bytes_ in steps] + [steps[-1][1]]
        ax.step(
            [time * unit.per_second for time in times],
            [bytes_ / size.bytes_ for bytes_ in held],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.4,
            label=f"{name}  {stages_label(stages_on[device])}",
        )


def _looks(lines: int) -> Sequence[tuple[str, str]]:
    """Return distinct colours and styles; for many lines a scale of colours."""
    looks = [(colour, style) for style in LINE_STYLES for colour in LINE_COLOURS]
    if lines <= len(looks):
        return looks[:lines]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # The upper end of the scale is too pale for a line on white.
    shades = (to_hex(colormaps["viridis"](0.9 * line / (lines - 1))) for line in range(lines))
    return [(shade, LINE_STYLES[0]) for shade in shades]


def _capacities(timeline: Timeline) -> dict[int, str]:
    """Return the names of the device types in use, by capacity in bytes, smallest first."""
    cluster = timeline.pipeline.problem.cluster
    types = dict.fromkeys(cluster.type_of(device) for device in timeline.pipeline.devices)
    names: dict[int, list[str]] = {}
    for name in types:
        names.setdefault(cluster.device_types[name].capacity_bytes, []).append(name)
    return {bytes_: ", ".join(names[bytes_]) for bytes_ in sorted(names)}


def _draw_capacities(ax: Axes, timeline: Timeline, size: SizeUnit) -> None:
    highest = max(timeline.peak_memory_bytes.values())
    capacities = _capacities(timeline)
    near = [bytes_ for bytes_ in capacities if bytes_ <= FURTHEST_CAPACITY * highest]
    far = [f"{name} {format_bytes(n)}" for n, name in capacities.items() if n not in near]
    for bytes_ in near:
        height = bytes_ / size.bytes_
        ax.axhline(height, color=MUTED_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
        _write_right(ax, height, f"capacity of {capacities[bytes_]}: {format_bytes(bytes_)}")
    top = 1.1 * max([highest, *near]) / size.bytes_
    ax.set_ylim(0.0, top if top > 0 else 1.0)
    if far:
        _write_right(ax, ax.get_ylim()[1], f"capacity beyond this plot: {', '.join(far)}")


def _write_right(ax: Axes, height: float, text: str) -> None:
    ax.annotate(
        plain_text(text),
        (1.0, height),
        xycoords=ax.get_yaxis_transform(),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=MUTED_COLOUR,
        fontsize="small",
    )


def _fullest(timeline: Timeline) -> str:
    peaks, pipeline = timeline.peak_memory_bytes, timeline.pipeline
    device = max(peaks, key=lambda name: peaks[name] / pipeline.capacity_bytes(name))
    peak, capacity = peaks[device], pipeline.capacity_bytes(device)
    used = f"{format_bytes(peak)} of {format_bytes(capacity)}, {peak / capacity:.0%}"
    return f"fullest is {device}: {used}"


def _draw_legend(ax: Axes, timeline: Timeline) -> None:
    """Draw the legend below the time axis, whatever the height of the axes."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > MOST_NAMES:
        handles, labels = [handles[0], handles[-1]], [f"first: {labels[0]}", f"last: {labels[-1]}"]
    ax.legend(
        handles,
        labels,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=3.4,
        ncols=min(4, len(labels)),
        frameon=False,
    )
