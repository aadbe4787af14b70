"""Gantt charts: one row per device, or per group of replicas; one box per operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    chart_rows,
    dress,
    legend_below,
    lighter,
    require_format,
    root_figure,
    save_figure,
    stacked_axes,
)
from planner.simulation.timeline import Timeline
from planner.units import TimeUnit, format_seconds, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 15.0
MOST_OPERATIONS = 160
"""Of a row with more, the middle of the iteration is left out: no box would be wide enough."""
GAP = 0.015
"""Width of the mark where time is left out, as a share of the axis."""
MOST_WHITE = 0.65
"""White in the lightest shade of a device's stages, which still has its hue."""
LEAST_BAR_PIXELS = 1.5
NARROWEST_WITH_EDGE_PIXELS = 5.0
SMALLEST_NUMBER_POINTS, LARGEST_NUMBER_POINTS = 4.5, 8.0
DIGIT_WIDTH = 0.64
"""Width of a digit of the default font, as a share of the font size."""


class Lane(NamedTuple):
    """A part of a row, from ``top`` to ``bottom``, relative to the row's middle, downwards."""

    top: float
    bottom: float


COMPUTE = Lane(-0.42, 0.20)
# A reduction may run while another stage of the device computes, so it lies over the boxes' edge.
REDUCTION = Lane(0.08, 0.20)
ACTIVATIONS = Lane(0.24, 0.32)
GRADIENTS = Lane(0.34, 0.42)
_MIDDLE = (COMPUTE.top + COMPUTE.bottom) / 2


class Look(NamedTuple):
    """The look of one kind of boxes; ``label`` is the legend's, ``colour`` its plain colour."""

    label: str
    colour: str
    lane: Lane


class Box(NamedTuple):
    """An event on the row of a device; times in seconds; ``text`` is written if it fits."""

    row: int
    start_s: float
    end_s: float
    look: Look
    white: float = 0.0
    text: str = ""


class Axis(NamedTuple):
    """A time axis of one or two parts of the iteration, in seconds, drawn without the rest."""

    unit: TimeUnit
    parts: tuple[tuple[float, float], ...]

    @property
    def gap_s(self) -> float:
        """The width of the mark between two parts."""
        return GAP * sum(end - start for start, end in self.parts)

    @property
    def offsets_s(self) -> list[float]:
        """What is taken from a time of each part to get its place."""
        shown_s, offsets = 0.0, []
        for start, end in self.parts:
            offsets.append(start - shown_s)
            shown_s += end - start + self.gap_s
        return offsets

    @property
    def width(self) -> float:
        """The end of the axis, in its unit."""
        shown_s = self.parts[-1][1] - self.offsets_s[-1]
        return shown_s * self.unit.per_second if shown_s > 0 else 1.0

    def spans(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """Yield start and length, in the axis' unit, of what is shown of an event."""
        for (first, last), offset in zip(self.parts, self.offsets_s, strict=True):
            begin, end = max(start_s, first), min(end_s, last)
            if begin < end:
                yield (begin - offset) * self.unit.per_second, (end - begin) * self.unit.per_second


def plot_gantt(timeline: Timeline, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw one iteration: rows are devices, boxes are operations with their microbatch's number.

    Thin bars are the all-reduces of gradients and, below the boxes, what the device sends, drawn a
    pixel and a half wide at least. Of many devices the replicas of a stage share a row. Of many
    microbatches the steady state is left out. The time axis is in s, ms or µs, as its label says.

    Args:
        timeline: what the simulator returned.
        ax: where to draw; default new axes on a figure of their own, outside pyplot.
        title: first line of the title; default the model, the cluster and the pipeline's size.

    Returns:
        The axes drawn on; ``ax.figure`` is the figure.
    """
    if ax is None:
        (ax,) = stacked_axes(WIDTH_INCHES, [_height_inches(timeline)])
    _draw(ax, timeline, Axis(time_unit(timeline.iteration_time_s), _parts(timeline)), title)
    return ax


def plot_gantts(charts: Sequence[tuple[str | None, Timeline]]) -> list[Axes]:
    """Draw charts of several timelines below each other, on one scale of time.

    Args:
        charts: titles (see :func:`plot_gantt`) and timelines, from top to bottom.
    """
    if len(charts) == 1:
        return [plot_gantt(charts[0][1], title=charts[0][0])]
    every = stacked_axes(WIDTH_INCHES, [_height_inches(timeline) for _, timeline in charts])
    end_s = max(timeline.iteration_time_s for _, timeline in charts)
    for ax, (title, timeline) in zip(every, charts, strict=True):
        _draw(ax, timeline, Axis(time_unit(end_s), ((0.0, end_s),)), title)
    return every


def save_gantts(charts: Sequence[tuple[str | None, Timeline]], path: str | Path) -> None:
    """Write :func:`plot_gantts` as PNG or SVG, by the path's suffix, atomically.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    require_format(path)
    save_figure(plot_gantts(charts)[0], path)


def boxes(timeline: Timeline) -> Iterator[Box]:
    """Yield all operations, reductions, optimizer steps, and transfers that take time.

    A transfer lies in the row of the device that sends it.
    """
    rows = {device: row for row, device in enumerate(chart_rows(timeline))}
    stages_on = timeline.pipeline.stages_on
    for event in timeline.operations:
        if event.device in rows:
            kind, stages = event.operation.kind, stages_on[event.device]
            white = MOST_WHITE * stages.index(event.operation.stage) / len(stages)
            look = Look(KIND_LABELS[kind], KIND_COLOURS[kind], COMPUTE)
            text = str(event.operation.microbatch)
            yield Box(rows[event.device], event.start_s, event.end_s, look, white, text)
    for reduction in timeline.collectives:
        look = Look(reduction.kind, ALL_REDUCE_COLOUR, REDUCTION)
        for device in rows.keys() & set(reduction.synchronisation.devices):
            yield Box(rows[device], reduction.start_s, reduction.end_s, look)
    look = Look("optimizer step", OPTIMIZER_COLOUR, COMPUTE)
    for device, row in rows.items():
        end_s = timeline.end_s[device]
        yield Box(row, end_s - timeline.optimizer_s[device], end_s, look)
    for sent in timeline.transfers:
        if sent.source in rows:
            look = _SENT[sent.operation.kind]
            yield Box(rows[sent.source], sent.start_s, sent.end_s, look)


_SENT = {
    "F": Look("activations sent", ACTIVATION_COLOUR, ACTIVATIONS),
    "B": Look("gradients sent", GRADIENT_COLOUR, GRADIENTS),
}


def _parts(timeline: Timeline) -> tuple[tuple[float, float], ...]:
    """Return the whole iteration, or its start and end if a row has too many operations."""
    whole = (0.0, timeline.iteration_time_s)
    per_device: dict[str, list[tuple[float, float]]] = {}
    for event in timeline.operations:
        per_device.setdefault(event.device, []).append((event.start_s, event.end_s))
    busiest = max(per_device.values(), key=len, default=[])
    if len(busiest) <= MOST_OPERATIONS:
        return (whole,)
    first, last = busiest[MOST_OPERATIONS // 2][1], busiest[-MOST_OPERATIONS // 2][0]
    return ((0.0, first), (last, timeline.iteration_time_s))


def _height_inches(timeline: Timeline) -> float:
    rows = len(chart_rows(timeline))
    return 1.5 + rows * min(0.6, max(0.21, 9 / rows))


def _draw(ax: Axes, timeline: Timeline, axis: Axis, title: str | None) -> None:
    _label_axes(ax, timeline, axis, title)
    ax.set_xlim(0.0, axis.width)
    # Only a layout that was carried out has widths in pixels.
    engine = root_figure(ax).get_layout_engine()
    if engine is not None:
        engine.execute(root_figure(ax))
    groups: dict[tuple[Look, float, int], list[tuple[float, float, str]]] = {}
    for box in boxes(timeline):
        for start, width in axis.spans(box.start_s, box.end_s):
            key = box.look, box.white, box.row
            groups.setdefault(key, []).append((start, width, box.text))
    for (look, white, row), spans in groups.items():
        _draw_boxes(ax, look, white, row, spans)
    _draw_legend(ax, [(look, white) for look, white, _ in groups])


def _draw_boxes(
    ax: Axes, look: Look, white: float, row: int, spans: Sequence[tuple[float, float, str]]
) -> None:
    """Draw the boxes of one look in one row, as one artist, and their numbers where these fit."""
    pixels = ax.get_window_extent().width / ax.get_xlim()[1]
    # Short messages would vanish beside long iterations.
    least = 0.0 if look.lane == COMPUTE else LEAST_BAR_PIXELS / pixels
    median = sorted(width for _, width, _ in spans)[len(spans) // 2]
    has_edge = max(median, least) * pixels >= NARROWEST_WITH_EDGE_PIXELS
    drawn = ax.broken_barh(
        [(start, max(width, least)) for start, width, _ in spans],
        (row + look.lane.top, look.lane.bottom - look.lane.top),
        facecolor=lighter(look.colour, white),
        # A white edge parts neighbours; on narrow boxes it would leave nothing of them.
        edgecolor="white",
        linewidth=0.6 if has_edge else 0.0,
        # Whole pixels make crisp edges, but of boxes narrower than that they drop some.
        snap=has_edge,
        zorder=1 if look.lane == COMPUTE else 2,
    )
    drawn.set_gid(look.label)
    if look.lane == COMPUTE:
        _draw_numbers(ax, row, spans, 72 / root_figure(ax).dpi * pixels)


def _draw_numbers(
    ax: Axes, row: int, spans: Sequence[tuple[float, float, str]], points_per_unit: float
) -> None:
    """Write texts into the boxes that are wide enough, as large as three digits at most fit."""
    digits = max(len(text) for _, _, text in spans)
    if not digits:
        return
    for start, width, text in spans:
        points = (width * points_per_unit - 1) / (digits * DIGIT_WIDTH)
        if points >= SMALLEST_NUMBER_POINTS:
            ax.text(
                start + width / 2,
                row + _MIDDLE,
                text,
                size=min(LARGEST_NUMBER_POINTS, points),
                color=INK_COLOUR,
                ha="center",
                va="center_baseline",
                clip_on=True,
            )


def _label_axes(ax: Axes, timeline: Timeline, axis: Axis, title: str | None) -> None:
    stages_on, rows = timeline.pipeline.stages_on, chart_rows(timeline)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(
        [row + _MIDDLE for row in range(len(rows))],
        [f"{name}  {stages_label(stages_on[device])}" for device, name in rows.items()],
    )
    # A pale track behind each row: what stays visible of it is idle time.
    for row in range(len(rows)):
        tracks = [
            (start - offset, end - start)
            for (start, end), offset in zip(axis.parts, axis.offsets_s, strict=True)
        ]
        ax.broken_barh(
            [(x * axis.unit.per_second, w * axis.unit.per_second) for x, w in tracks],
            (row + COMPUTE.top, COMPUTE.bottom - COMPUTE.top),
            facecolor=IDLE_COLOUR,
            zorder=0,
        )
    _set_ticks(ax, axis)
    figures = f"iteration {format_seconds(timeline.iteration_time_s)}, bubble {timeline.bubble:.1%}"
    if len(rows) < len(stages_on):
        figures += "; replicas of a stage share a row, which shows the first one"
    if len(axis.parts) > 1:
        left_out_s = axis.parts[1][0] - axis.parts[0][1]
        figures += f"; {format_seconds(left_out_s)} of the steady state are left out"
    dress(ax, timeline, title, figures, unit=axis.unit, grid="x")


def _set_ticks(ax: Axes, axis: Axis) -> None:
    """Put round times on the axis, in each of its parts."""
    from matplotlib.ticker import MaxNLocator

    locator, scale = MaxNLocator(8 // len(axis.parts)), axis.unit.per_second
    places, labels = [], []
    for (start, end), offset in zip(axis.parts, axis.offsets_s, strict=True):
        for time in locator.tick_values(start * scale, end * scale):
            if start * scale <= time <= end * scale:
                places.append(time - offset * scale)
                labels.append(f"{time:g}")
    ax.set_xticks(places, labels)


def _draw_legend(ax: Axes, looks: Sequence[tuple[Look, float]]) -> None:
    """Draw one entry a label."""
    from matplotlib.patches import Patch

    colours = {look.label: look.colour for look, _ in looks}
    handles = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    if any(white for _, white in looks):
        pale = lighter(MUTED_COLOUR, 0.5)
        handles.append(Patch(facecolor=pale, label="paler: later stages of the device"))
    legend_below(ax, handles, len(handles))
