"""Matplotlib figures without pyplot: deterministic bytes, written atomically."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.errors import PipeplanError
from planner.plan.operations import Kind
from planner.records.document import write_atomically
from planner.report.tables import problem_title
from planner.units import TimeUnit

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from planner.simulation.timeline import Timeline

# Forward is cold, everything backward is warm; the lightness differs too, for grey print.
KIND_COLOURS: dict[Kind, str] = {"F": "#56B4E9", "B": "#E69F00", "I": "#D55E00", "W": "#F0E442"}
ACTIVATION_COLOUR = "#0072B2"
GRADIENT_COLOUR = "#8C4A00"
ALL_REDUCE_COLOUR = "#CC79A7"
OPTIMIZER_COLOUR = "#009E73"
IDLE_COLOUR = "#F1F1F1"
GRID_COLOUR = "#DDDDDD"
INK_COLOUR = "#1A1A1A"
MUTED_COLOUR = "#777777"

# Lines need more contrast with white than boxes do: the palette without its yellow.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1A1A1A")


def lighter(colour: str, share: float) -> str:
    """Mix a colour with white.

    Args:
        colour: as ``#RRGGBB``.
        share: of white; 0 leaves the colour as it is, 1 gives white.
    """
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02X}" for value in channels)


DOTS_PER_INCH, SCREEN_DOTS_PER_INCH = 150, 110
# SVG carries a date and random ids unless told otherwise; PNG carries neither.
_METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}}


def stacked_axes(width_inches: float, heights_inches: Sequence[float]) -> list[Axes]:
    """Return axes of the given heights below each other, on a figure without pyplot state.

    Args:
        width_inches: of the figure.
        heights_inches: of the axes, from top to bottom.
    """
    from matplotlib.figure import Figure

    size = (width_inches, sum(heights_inches))
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    grid = figure.subplots(len(heights_inches), squeeze=False, height_ratios=heights_inches)
    return list(grid[:, 0])


def require_format(path: str | Path) -> str:
    """Return the suffix of a figure's path, ``.png`` or ``.svg``.

    Raises:
        PipeplanError: for another suffix.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise PipeplanError(
            f"{path}: a figure cannot be written with suffix {suffix!r}; name the file .png or .svg"
        )
    return suffix


def save_figure(axes: Axes, path: str | Path) -> None:
    """Write the figure of axes as PNG or SVG by the path's suffix, atomically.

    Equal figures give equal bytes.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    from matplotlib import rc_context

    suffix = require_format(path)
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "pipeplan"}):
        root_figure(axes).savefig(buffer, format=suffix[1:], metadata=_METADATA[suffix])
    write_atomically(path, buffer.getvalue())


def picture_data(axes: Axes) -> str:
    """Return the figure of axes as a PNG in a ``data:`` address."""
    picture = BytesIO()
    root_figure(axes).savefig(picture, format="png", dpi=SCREEN_DOTS_PER_INCH)
    return f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"


MOST_ROWS = 24
"""Of more devices, the replicas of a stage on devices of one type share a row."""


def chart_rows(timeline: Timeline) -> dict[str, str]:
    """Return the devices that charts draw, in pipeline order, with the names of their rows."""
    pipeline = timeline.pipeline
    if len(pipeline.devices) <= MOST_ROWS:
        return {device: device for device in pipeline.devices}
    rows: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for device, stages in pipeline.stages_on.items():
        kind = pipeline.problem.cluster.type_of(device)
        rows.setdefault((tuple(stages), kind), []).append(device)
    return {
        first: f"{first} and {len(others):,} more" if others else first
        for first, *others in rows.values()
    }


def dress(
    axes: Axes,
    timeline: Timeline,
    title: str | None,
    figures: str,
    *,
    unit: TimeUnit,
    grid: Literal["x", "both"],
) -> None:
    """Give a chart over time its title and its axis, a faint grid, and no frame.

    Args:
        axes: of the chart.
        timeline: that it shows.
        title: first line of the title; None: the model, the cluster and the pipeline's size.
        figures: second line.
        unit: of the time axis.
        grid: across the time axis, or across both.
    """
    axes.set_xlabel(f"time ({unit.symbol})")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis=grid, color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    heading = plain_text(title or problem_title(timeline))
    axes.set_title(f"{heading}\n{figures}", loc="left", fontsize="medium")


def legend_below(axes: Axes, handles: Sequence[Artist], columns: int) -> None:
    """Draw a legend below the time axis, whatever the height of the axes."""
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=3.4,
        ncols=columns,
        frameon=False,
        handlelength=1.6,
    )


def plain_text(text: str) -> str:
    """Escape text for matplotlib, which reads text between two dollars as a formula."""
    return text.replace("$", r"\$")


def root_figure(axes: Axes) -> Figure:
    """Return the figure of axes, through any subfigures."""
    from matplotlib.figure import Figure

    figure = axes.figure.figure  # A subfigure's figure is the root; the root's is itself.
    assert isinstance(figure, Figure)
    return figure
