"""Gantt charts: one row per device, or per group of replicas alike; one box per operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from planner.plan.operations import KIND_LABELS, stages_label
from planner.report.figures import (
    ACTIVATION_COLOUR,
    ALL_REDUCE_COLOUR,
    GRADIENT_COLOUR,
    IDLE_COLOUR,
    INK_COLOUR,
    KIND_COLOURS,
    MUTED_COLOUR,
    OPTIMIZER_COLOUR,
    bare_frame,
    lighter,
    new_axes,
    plain_text,
    require_format,
    root_figure,
    save_figure,
    stacked_axes,
)
from planner.report.replicas import charted_together, row_name
from planner.report.tables import problem_title
from planner.simulation.timeline import OperationEvent, Timeline
from planner.units import TimeUnit, format_seconds, time_unit

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


# The lightest shade still has its hue.
_MOST_WHITE = 0.65


class GanttRow(NamedTuple):
    """A part of a row, from ``top`` to ``bottom``, relative to the row's middle, downwards."""

    top: float
    bottom: float


COMPUTE = GanttRow(-0.42, 0.20)
# A reduction may run while another stage of the device computes, so it lies over the boxes' edge.
REDUCTION = GanttRow(0.08, 0.20)
ACTIVATIONS = GanttRow(0.24, 0.32)
GRADIENTS = GanttRow(0.34, 0.42)


class GanttStyle(NamedTuple):
    """The look of one kind of boxes; ``label`` is the legend's."""

    label: str
    colour: str
    lane: GanttRow


class Box(NamedTuple):
    """One event on the row of one device; times in seconds."""

    row: int
    start_s: float
    end_s: float


class Boxes(NamedTuple):
    """All boxes of one style."""

    look: GanttStyle
    boxes: tuple[Box, ...]


_COLLECTIVES = {
    kind: GanttStyle(kind, ALL_REDUCE_COLOUR, REDUCTION)
    for kind in ("all-reduce", "reduce-scatter", "all-gather")
}
_OPTIMIZER = GanttStyle("optimizer step", OPTIMIZER_COLOUR, COMPUTE)
_TRANSFERS = {
    "F": GanttStyle("activations sent", ACTIVATION_COLOUR, ACTIVATIONS),
    "B": GanttStyle("gradients sent", GRADIENT_COLOUR, GRADIENTS),
}

WIDTH_INCHES = 15.0
# Beyond this many boxes none is wide enough for a number, and looking for one takes time.
MOST_NUMBERS = 3000
LARGEST_NUMBER_POINTS = 8.0
SMALLEST_NUMBER_POINTS = 4.5
# Width of a digit of the default font, as a share of the font size.
_DIGIT_WIDTH = 0.64
_NARROWEST_WITH_EDGE_PIXELS = 5.0
_LEAST_BAR_PIXELS = 1.5
_MIDDLE = (COMPUTE.top + COMPUTE.bottom) / 2


def plot_gantt(timeline: Timeline, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw one iteration: rows are devices, boxes are operations with their microbatch's number.

    Thin bars are the all-reduces of gradients and, below the boxes, what the device sends, drawn a
    pixel and a half wide at least. Of many devices those that are alike share a row, which shows
    the first one's microbatches. The time axis is in s, ms or µs, as its label says.

    Args:
        timeline: what the simulator returned.
        ax: where to draw; default new axes on a figure of their own, outside pyplot.
        title: first line of the title; default the model, the cluster and the pipeline's size.

    Returns:
        The axes drawn on; ``ax.figure`` is the figure.
    """
    if ax is None:
        ax = new_axes(WIDTH_INCHES, _height_inches(len(rows_of(timeline))))
    end_s = timeline.iteration_time_s
    _draw(ax, timeline, Scale(time_unit(end_s), end_s), title)
    return ax


class Scale(NamedTuple):
    """A time axis: its unit, and where it ends."""

    unit: TimeUnit
    end_s: float


def _draw(ax: Axes, timeline: Timeline, scale: Scale, title: str | None) -> None:
    unit = scale.unit
    _label_axes(ax, timeline, scale, title)
    _draw_idle(ax, timeline, unit)
    groups = (*operation_boxes(timeline), *other_boxes(timeline))
    for group in groups:
        _draw_boxes(ax, group, unit)
    _draw_legend(ax, [group.look for group in groups])
    if len(timeline.operations) <= MOST_NUMBERS:
        _draw_numbers(ax, timeline, unit)


def save_gantts(charts: Sequence[tuple[str | None, Timeline]], path: str | Path) -> None:
    """Write :func:`plot_gantts` as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(root_figure(plot_gantts(charts)[0]), path)


def plot_gantts(charts: Sequence[tuple[str | None, Timeline]]) -> list[Axes]:
    """Draw charts of several timelines below each other, on one scale of time.

    Args:
        charts: titles (see :func:`plot_gantt`) and timelines, from top to bottom.
    """
    heights = [_height_inches(len(rows_of(timeline))) for _, timeline in charts]
    every = stacked_axes(WIDTH_INCHES, heights)
    end_s = max(timeline.iteration_time_s for _, timeline in charts)
    for ax, (title, timeline) in zip(every, charts, strict=True):
        _draw(ax, timeline, Scale(time_unit(end_s), end_s), title)
    return every


def _height_inches(rows: int) -> float:
    return 1.5 + rows * min(0.6, max(0.21, 9 / rows))


def _draw_idle(ax: Axes, timeline: Timeline, unit: TimeUnit) -> None:
    """A pale track behind each row: what stays visible of it is idle time."""
    end = timeline.iteration_time_s * unit.per_second
    for row in rows_of(timeline).values():
        ax.broken_barh(
            [(0.0, end)],
            (row + COMPUTE.top, COMPUTE.bottom - COMPUTE.top),
            facecolor=IDLE_COLOUR,
            zorder=0,
        )


def _draw_boxes(ax: Axes, group: Boxes, unit: TimeUnit) -> None:
    """All boxes of one look as one collection: an artist a box would take minutes."""
    from matplotlib.collections import PolyCollection

    corners = _corners(group, unit)
    if group.look.lane != COMPUTE:
        _widen(corners, _LEAST_BAR_PIXELS / _pixels_per_unit(ax))
    edge_points = _edge_points(ax, corners)
    collection = PolyCollection(
        # The annotation leaves out the three-dimensional array, which is drawn without a loop.
        cast("Sequence[NDArray[np.float64]]", corners),
        facecolor=group.look.colour,
        edgecolor="white",
        linewidth=edge_points,
        # Whole pixels make crisp edges, but of boxes narrower than that they drop some.
        snap=edge_points > 0,
        zorder=1 if group.look.lane == COMPUTE else 2,
    )
    collection.set_gid(group.look.label)
    ax.add_collection(collection, autolim=False)


def _corners(group: Boxes, unit: TimeUnit) -> NDArray[np.float64]:
    import numpy as np

    boxes = np.asarray(group.boxes, dtype=np.float64)
    left, right = boxes[:, 1] * unit.per_second, boxes[:, 2] * unit.per_second
    top, bottom = boxes[:, 0] + group.look.lane.top, boxes[:, 0] + group.look.lane.bottom
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, bottom, bottom], axis=1)
    return np.stack([x, y], axis=2)


def _widen(corners: NDArray[np.float64], least: float) -> None:
    """Make bars so long at least, for short messages would vanish beside long iterations."""
    corners[:, 1:3, 0] = corners[:, 1:3, 0].clip(min=corners[:, :1, 0] + least)


def _edge_points(ax: Axes, corners: NDArray[np.float64]) -> float:
    """A white edge parts neighbours; on narrow boxes it would leave nothing of them."""
    import numpy as np

    width = float(np.median(corners[:, 1, 0] - corners[:, 0, 0]))
    return 0.6 if width * _pixels_per_unit(ax) >= _NARROWEST_WITH_EDGE_PIXELS else 0.0


def _pixels_per_unit(ax: Axes) -> float:
    left, right = ax.get_xlim()
    return ax.get_window_extent().width / (right - left)


def _label_axes(ax: Axes, timeline: Timeline, scale: Scale, title: str | None) -> None:
    stages_on = timeline.pipeline.stages_on
    rows, together = rows_of(timeline), charted_together(timeline)
    end = scale.end_s * scale.unit.per_second
    ax.set_xlim(0.0, end if end > 0 else 1.0)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(
        [row + _MIDDLE for row in rows.values()],
        [f"{row_name(together[device])}  {stages_label(stages_on[device])}" for device in rows],
    )
    ax.set_xlabel(f"time ({scale.unit.symbol})")
    bare_frame(ax)
    figures = f"iteration {format_seconds(timeline.iteration_time_s)}, bubble {timeline.bubble:.1%}"
    if len(rows) < len(stages_on):
        figures += "; replicas that are alike share a row, with the first one's microbatches"
    heading = plain_text(title or problem_title(timeline))
    ax.set_title(f"{heading}\n{figures}", loc="left", fontsize="medium")


def _draw_legend(ax: Axes, looks: Sequence[GanttStyle]) -> None:
    """One entry a label, below the time axis whatever the height of the axes."""
    from matplotlib.patches import Patch

    # Shades only raise the channels of a colour, so the plain one is the least.
    colours: dict[str, str] = {}
    for look in looks:
        colours[look.label] = min(colours.get(look.label, look.colour), look.colour)
    handles = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    if len(looks) > len(colours):
        pale = lighter(MUTED_COLOUR, 0.5)
        handles.append(Patch(facecolor=pale, label="paler: later stages of the device"))
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=3.4,
        ncols=len(handles),
        frameon=False,
        handlelength=1.2,
    )


def _draw_numbers(ax: Axes, timeline: Timeline, unit: TimeUnit) -> None:
    """Microbatch numbers in the boxes that are wide enough, all for one stage of one size."""
    root_figure(ax).draw_without_rendering()  # Only a layout that was carried out has widths.
    pixels_per_second = _pixels_per_unit(ax) * unit.per_second
    digits = len(str(timeline.pipeline.microbatches - 1))
    rows = rows_of(timeline)
    for event in timeline.operations:
        if event.device not in rows:
            continue
        points = _number_points(ax, (event.end_s - event.start_s) * pixels_per_second, digits)
        if points >= SMALLEST_NUMBER_POINTS:
            ax.text(
                (event.start_s + event.end_s) / 2 * unit.per_second,
                rows[event.device] + _MIDDLE,
                str(event.operation.microbatch),
                size=points,
                color=INK_COLOUR,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _number_points(ax: Axes, width_pixels: float, digits: int) -> float:
    """The font size, in points, at which a number of so many digits fits a box."""
    width_points = width_pixels * 72 / root_figure(ax).dpi
    return min(LARGEST_NUMBER_POINTS, (width_points - 1) / (digits * _DIGIT_WIDTH))


def rows_of(timeline: Timeline) -> dict[str, int]:
    """Return the row of each device that is drawn, in pipeline order."""
    return {device: row for row, device in enumerate(charted_together(timeline))}


def operation_boxes(timeline: Timeline) -> tuple[Boxes, ...]:
    """Return every operation as a box, grouped by kind and by the stage's shade on its device."""
    shades = {
        (device, stage): _MOST_WHITE * place / len(stages)
        for device, stages in timeline.pipeline.stages_on.items()
        for place, stage in enumerate(stages)
    }
    rows = rows_of(timeline)

    def look(event: OperationEvent) -> GanttStyle:
        kind = event.operation.kind
        shade = shades[event.device, event.operation.stage]
        return GanttStyle(KIND_LABELS[kind], lighter(KIND_COLOURS[kind], shade), COMPUTE)

    return _grouped(
        (look(event), Box(rows[event.device], event.start_s, event.end_s))
        for event in timeline.operations
        if event.device in rows
    )


def other_boxes(timeline: Timeline) -> tuple[Boxes, ...]:
    """Return boxes of all-reduces, optimizer steps, and transfers that take time.

    A transfer lies in the row of the device that sends it.
    """
    return _grouped([*_reductions(timeline), *_optimizer(timeline), *_transfers(timeline)])


def _optimizer(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for device, end_s in timeline.end_s.items():
        seconds = timeline.optimizer_s[device]
        if seconds > 0 and device in rows:
            yield _OPTIMIZER, Box(rows[device], end_s - seconds, end_s)


def _reductions(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for event in timeline.collectives:
        for device in event.synchronisation.devices:
            if device in rows:
                yield _COLLECTIVES[event.kind], Box(rows[device], event.start_s, event.end_s)


def _transfers(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for event in timeline.transfers:
        if event.end_s > event.start_s and event.source in rows:
            look = _TRANSFERS[event.operation.kind]
            yield look, Box(rows[event.source], event.start_s, event.end_s)


def _grouped(pairs: Iterable[tuple[GanttStyle, Box]]) -> tuple[Boxes, ...]:
    groups: dict[GanttStyle, list[Box]] = {}
    for look, box in pairs:
        groups.setdefault(look, []).append(box)
    return tuple(Boxes(look, tuple(boxes)) for look, boxes in groups.items())
