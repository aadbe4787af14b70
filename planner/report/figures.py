"""Figures without pyplot: drawn in memory, the same bytes every time, written whole."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.artifacts.document import write_atomically
from planner.errors import PipeplanError
from planner.report.palette import GRID_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150
# SVG carries a date and random ids unless told otherwise; PNG carries neither.
_METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}}


def new_axes(width_inches: float, height_inches: float) -> Axes:
    """Axes alone on a new figure that no pyplot state refers to.

    Args:
        width_inches: of the figure.
        height_inches: of the figure.
    """
    return stacked_axes(width_inches, [height_inches])[0]


def stacked_axes(width_inches: float, heights_inches: Sequence[float]) -> list[Axes]:
    """Axes below each other on a new figure, so high each, that no pyplot state refers to.

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
    """The suffix of a figure's path, ``.png`` or ``.svg``.

    Raises:
        PipeplanError: for another suffix.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise PipeplanError(
            f"{path}: a figure cannot be written with suffix {suffix!r}; name the file .png or .svg"
        )
    return suffix


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG or SVG by its suffix, atomically; equal figures give equal bytes.

    Raises:
        PipeplanError: for another suffix, or if the file cannot be written.
    """
    from matplotlib import rc_context

    suffix = require_format(path)
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "pipeplan"}):
        figure.savefig(buffer, format=suffix[1:], metadata=_METADATA[suffix])
    write_atomically(path, buffer.getvalue())


def bare_frame(axes: Axes, grid: Literal["x", "both"] = "x") -> None:
    """Leave only the time axis of the frame, and a faint grid to read it by."""
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis=grid, color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)


def plain(text: str) -> str:
    """Text as it is: matplotlib reads what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def root_figure(axes: Axes) -> Figure:
    """The figure that axes stand on, through any subfigures."""
    from matplotlib.figure import Figure

    figure = axes.figure.figure  # A subfigure's figure is the root; the root's is itself.
    assert isinstance(figure, Figure)
    return figure
