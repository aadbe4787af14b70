"""Memory over time: one line per device, with the devices' capacities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.plan.operations import stages_label
from planner.report.figures import (
    LINE_COLOURS,
    MUTED_COLOUR,
    chart_rows,
    dress,
    legend_below,
    plain_text,
    require_format,
    save_figure,
    stacked_axes,
)
from planner.units import SizeUnit, TimeUnit, format_bytes, size_unit, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from planner.simulation.timeline import Timeline

WIDTH_INCHES, HEIGHT_INCHES = 13.0, 6.5
MOST_NAMES = 24
"""With more lines than this the legend names only the first and the last."""
LINE_STYLES = ("solid", "dashdot", "dotted")
"""Dashed lines are capacities."""
FURTHEST_CAPACITY = 3.0
"""A capacity further above the highest peak than this factor would flatten every line."""


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
        (ax,) = stacked_axes(WIDTH_INCHES, [HEIGHT_INCHES])
    unit = time_unit(timeline.iteration_time_s)
    size = size_unit(max(timeline.peak_memory_bytes.values()))
    _draw_devices(ax, timeline, unit, size)
    _draw_capacities(ax, timeline, size)
    end = timeline.iteration_time_s * unit.per_second
    ax.set_xlim(0.0, end if end > 0 else 1.0)
    ax.set_ylabel(f"memory in use ({size.symbol})")
    dress(ax, timeline, title, _fullest(timeline), unit=unit, grid="both")
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > MOST_NAMES:
        handles = [handles[0], handles[-1]]
        for handle, which in zip(handles, ("first", "last"), strict=True):
            handle.set_label(f"{which}: {handle.get_label()}")
    legend_below(ax, handles, min(4, len(handles)))
    return ax


def save_memory(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Write :func:`plot_memory`'s chart as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(plot_memory(timeline, title=title), path)


def _draw_devices(ax: Axes, timeline: Timeline, unit: TimeUnit, size: SizeUnit) -> None:
    """Draw steps up to the end of the iteration; of very many lines the looks repeat."""
    stages_on = timeline.pipeline.stages_on
    for number, (device, name) in enumerate(chart_rows(timeline).items()):
        steps = [*timeline.memory[device]]
        steps.append((timeline.iteration_time_s, steps[-1][1]))
        ax.step(
            [time * unit.per_second for time, _ in steps],
            [bytes_ / size.bytes_ for _, bytes_ in steps],
            where="post",
            color=LINE_COLOURS[number % len(LINE_COLOURS)],
            linestyle=LINE_STYLES[number // len(LINE_COLOURS) % len(LINE_STYLES)],
            linewidth=1.4,
            label=f"{name}  {stages_label(stages_on[device])}",
        )


def _draw_capacities(ax: Axes, timeline: Timeline, size: SizeUnit) -> None:
    cluster, highest = timeline.pipeline.problem.cluster, max(timeline.peak_memory_bytes.values())
    names: dict[int, list[str]] = {}
    for kind in dict.fromkeys(map(cluster.type_of, timeline.pipeline.devices)):
        names.setdefault(cluster.device_types[kind].capacity_bytes, []).append(kind)
    near = [bytes_ for bytes_ in sorted(names) if bytes_ <= FURTHEST_CAPACITY * highest]
    for bytes_ in near:
        height = bytes_ / size.bytes_
        ax.axhline(height, color=MUTED_COLOUR, linestyle="--", linewidth=1.2, zorder=1)
        _write_right(ax, height, f"capacity of {', '.join(names[bytes_])}: {format_bytes(bytes_)}")
    top = 1.1 * max([highest, *near]) / size.bytes_
    ax.set_ylim(0.0, top if top > 0 else 1.0)
    far = [f"{', '.join(names[n])} {format_bytes(n)}" for n in sorted(names) if n not in near]
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
