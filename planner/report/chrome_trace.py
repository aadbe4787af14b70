"""A simulated timeline as a Chrome trace; the links' process has a thread for every link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.measured.chrome_trace import ChromeTrace, Message, Span, lanes, nanoseconds
from planner.records.document import write_atomically
from planner.simulation.timeline import Timeline, TransferEvent


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as plain JSON values, see :mod:`planner.measured.chrome_trace`.

    All-reduces are on every device that takes part; transfers that take no time are left out.
    """
    pipeline = timeline.pipeline
    trace = ChromeTrace({device: pipeline.stages_on[device] for device in pipeline.devices})
    for event in timeline.operations:
        trace.operation(event.device, event.operation, _span(event.start_s, event.end_s))
    for reduction in timeline.collectives:
        what, span = reduction.synchronisation, _span(reduction.start_s, reduction.end_s)
        for device in what.devices:
            trace.reduction(device, what.stages, what.bytes, span, reduction.kind)
    for device, end_s in timeline.end_s.items():
        trace.optimizer(device, _span(end_s - timeline.optimizer_s[device], end_s))
    trace.links(
        {
            name: [_message(timeline, event) for event in events]
            for name, events in _link_threads(timeline).items()
        }
    )
    for device, steps in timeline.memory.items():
        for time_s, bytes_ in steps:
            trace.memory(device, "memory", nanoseconds(time_s), bytes_)
    other_data = {
        "model": pipeline.problem.graph.name,
        "cluster": pipeline.problem.cluster.name,
        "iteration_time_s": timeline.iteration_time_s,
        "bubble": timeline.bubble,
    }
    return trace.data(other_data)


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write :func:`chrome_trace` as JSON, atomically.

    Raises:
        PipeplanError: if the file cannot be written.
    """
    write_atomically(path, json.dumps(chrome_trace(timeline), ensure_ascii=False) + "\n")


def _span(start_s: float, end_s: float) -> Span:
    return nanoseconds(start_s), nanoseconds(end_s)


def _message(timeline: Timeline, event: TransferEvent) -> Message:
    stage = timeline.pipeline.stages[event.operation.stage]
    bytes_ = stage.sent_bytes if event.operation.kind == "F" else stage.returned_bytes
    span = _span(event.start_s, event.end_s)
    return Message(event.operation, span, event.source, event.target, bytes_, {})


def _link_threads(timeline: Timeline) -> dict[str, list[TransferEvent]]:
    """Return transfers by the thread that shows them: of each link, as many as it has at once."""
    cluster = timeline.pipeline.problem.cluster
    moving = [event for event in timeline.transfers if event.end_s > event.start_s]
    held = sorted(
        ((link, event) for event in moving for link in event.links), key=lambda row: row[0]
    )

    def name_of(row: tuple[tuple[int, int], TransferEvent], lane: int) -> str:
        # Parallel links between the same ends differ by their index alone.
        name = f"{cluster.link_name(row[0])} (link {row[0][0]}"
        return f"{name})" if lane == 1 else f"{name}, {lane})"

    threads = lanes(held, lambda row: (row[1].start_s, row[1].end_s), name_of)
    # Transfers over shared links may overlap.
    shared = lanes(
        (event for event in moving if not event.links),
        lambda event: (event.start_s, event.end_s),
        lambda event, lane: f"{event.source}>{event.target} (shared, {lane})",
    )
    return {**{name: [event for _, event in rows] for name, rows in threads.items()}, **shared}
