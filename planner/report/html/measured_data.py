"""A measured iteration as the page's scripts read it, in the ticks of the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.artifacts.measured import MeasuredTimeline
from planner.report.html.timeline_data import Spans, Ticks, spans


def typical_step(measured: MeasuredTimeline) -> int:
    """The step that is shown: of those that count the one of median length, the earlier of two."""
    lengths = {row.step: row.iteration_time_s for row in measured.steps}
    ranked = sorted(measured.counted_steps, key=lambda step: (lengths[step], step))
    return ranked[(len(ranked) - 1) // 2]


def measured_data(
    measured: MeasuredTimeline, devices: Sequence[str], tick_s: float
) -> dict[str, Any]:
    """One step of a measurement.

    Args:
        measured: of the plan shown.
        devices: of the plan in the order of the chart's rows.
        tick_s: of the simulation's data.
    """
    step, ticks = typical_step(measured), Ticks(tick_s)

    def rows(events: Iterable[Any], end: str = "device") -> list[list[Any]]:
        """Events of the step by the device at one end."""
        found: dict[str, list[Any]] = {device: [] for device in devices}
        for event in events:
            if event.step == step:
                found[getattr(event, end)].append(event)
        return list(found.values())

    def columns(events: Iterable[Any]) -> Spans:
        return spans((event.what, *ticks.span(event.start_s, event.end_s)) for event in events)

    return {
        "step": step,
        "end": ticks.of(measured.lengths_s[step]),
        "operations": [columns(row) for row in rows(measured.operations)],
        "sends": [columns(row) for row in rows(measured.transfers, "source")],
        "reductions": [
            [
                {"stages": list(event.stages), "span": ticks.span(event.start_s, event.end_s)}
                for event in row
            ]
            for row in rows(measured.reductions)
        ],
        "optimizer": [
            [ticks.span(event.start_s, event.end_s) for event in row]
            for row in rows(measured.optimizer_steps)
        ],
    }
