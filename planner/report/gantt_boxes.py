"""A timeline laid out as boxes in rows, before any drawing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from planner.plan.operations import KIND_LABELS
from planner.report.figures import (
    ACTIVATION_COLOUR,
    ALL_REDUCE_COLOUR,
    GRADIENT_COLOUR,
    KIND_COLOURS,
    OPTIMIZER_COLOUR,
    lighter,
)
from planner.simulation.timeline import OperationEvent, Timeline

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


_ALL_REDUCE = GanttStyle("all-reduce", ALL_REDUCE_COLOUR, REDUCTION)
_OPTIMIZER = GanttStyle("optimizer step", OPTIMIZER_COLOUR, COMPUTE)
_TRANSFERS = {
    "F": GanttStyle("activations sent", ACTIVATION_COLOUR, ACTIVATIONS),
    "B": GanttStyle("gradients sent", GRADIENT_COLOUR, GRADIENTS),
}


def rows_of(timeline: Timeline) -> dict[str, int]:
    """Return the row of each device, in pipeline order."""
    return {device: row for row, device in enumerate(timeline.pipeline.devices)}


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
    )


def other_boxes(timeline: Timeline) -> tuple[Boxes, ...]:
    """Return boxes of all-reduces, optimizer steps, and transfers that take time.

    A transfer lies in the row of the device that sends it.
    """
    return _grouped([*_reductions(timeline), *_optimizer(timeline), *_transfers(timeline)])


def _optimizer(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for device, end_s in timeline.end_s.items():
        seconds = timeline.pipeline.optimizer_s[device]
        if seconds > 0:
            yield _OPTIMIZER, Box(rows[device], end_s - seconds, end_s)


def _reductions(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for event in timeline.synchronisations:
        for device in event.synchronisation.devices:
            yield _ALL_REDUCE, Box(rows[device], event.start_s, event.end_s)


def _transfers(timeline: Timeline) -> Iterator[tuple[GanttStyle, Box]]:
    rows = rows_of(timeline)
    for event in timeline.transfers:
        if event.end_s > event.start_s:
            look = _TRANSFERS[event.operation.kind]
            yield look, Box(rows[event.source], event.start_s, event.end_s)


def _grouped(pairs: Iterable[tuple[GanttStyle, Box]]) -> tuple[Boxes, ...]:
    groups: dict[GanttStyle, list[Box]] = {}
    for look, box in pairs:
        groups.setdefault(look, []).append(box)
    return tuple(Boxes(look, tuple(boxes)) for look, boxes in groups.items())
