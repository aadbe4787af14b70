"""A simulated timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) opens.

Its form is that of :mod:`planner.measured.trace_events`; the process of the links has a thread
for every link resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.measured.trace_events import (
    Event,
    Span,
    counter_event,
    device_names,
    lanes,
    links_names,
    nanoseconds,
    operation_event,
    optimizer_event,
    reduction_event,
    trace_object,
    transfer_event,
)
from planner.records.document import write_atomically
from planner.simulation.timeline import Timeline, TransferEvent


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as plain JSON values; ``ts`` and ``dur`` are in microseconds.

    Times are rounded to whole nanoseconds, Perfetto's resolution, so that an event ends exactly
    where the next one starts. Transfers that take no time are left out.

    Returns:
        An object with ``traceEvents`` in order of ``ts``, names of processes and threads first.
    """
    events = [*_operations(timeline), *_steps(timeline), *_links(timeline), *_memory(timeline)]
    other_data = {
        "model": timeline.pipeline.problem.graph.name,
        "cluster": timeline.pipeline.problem.cluster.name,
        "iteration_time_s": timeline.iteration_time_s,
        "bubble": timeline.bubble,
    }
    return trace_object(other_data, _names(timeline), events)


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write :func:`chrome_trace` as JSON, atomically.

    Raises:
        PipeplanError: if the file cannot be written.
    """
    write_atomically(path, json.dumps(chrome_trace(timeline), ensure_ascii=False) + "\n")


def _process_ids(timeline: Timeline) -> dict[str, int]:
    """Return process ids by device, from 1, since viewers take process 0 for the idle one."""
    return {device: index for index, device in enumerate(timeline.pipeline.devices, 1)}


def _links_process(timeline: Timeline) -> int:
    return len(timeline.pipeline.devices) + 1


def _span(start_s: float, end_s: float) -> Span:
    return nanoseconds(start_s), nanoseconds(end_s)


def _names(timeline: Timeline) -> Iterator[Event]:
    for device, process in _process_ids(timeline).items():
        yield from device_names(process, device, timeline.pipeline.stages_on[device])
    yield from links_names(_links_process(timeline), _link_threads(timeline))


def _operations(timeline: Timeline) -> Iterator[Event]:
    processes = _process_ids(timeline)
    for event in timeline.operations:
        span = _span(event.start_s, event.end_s)
        yield operation_event(processes[event.device], event.operation, span)


def _steps(timeline: Timeline) -> Iterator[Event]:
    """All-reduces, once on every device that takes part, and optimizer steps."""
    processes = _process_ids(timeline)
    for event in timeline.collectives:
        what, span = event.synchronisation, _span(event.start_s, event.end_s)
        for device in what.devices:
            yield reduction_event(processes[device], what.stages, what.bytes, span, kind=event.kind)
    for device, end_s in timeline.end_s.items():
        start_s = end_s - timeline.optimizer_s[device]
        yield optimizer_event(processes[device], _span(start_s, end_s))


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


def _links(timeline: Timeline) -> Iterator[Event]:
    process = _links_process(timeline)
    for thread, transfers in enumerate(_link_threads(timeline).values()):
        for event in transfers:
            yield transfer_event(
                process,
                thread,
                event.operation,
                _span(event.start_s, event.end_s),
                source=event.source,
                target=event.target,
                bytes_=_bytes_moved(timeline, event),
            )


def _bytes_moved(timeline: Timeline, event: TransferEvent) -> int:
    stage = timeline.pipeline.stages[event.operation.stage]
    return stage.sent_bytes if event.operation.kind == "F" else stage.returned_bytes


def _memory(timeline: Timeline) -> Iterator[Event]:
    processes = _process_ids(timeline)
    for device, steps in timeline.memory.items():
        for time_s, bytes_ in steps:
            yield counter_event(processes[device], "memory", nanoseconds(time_s), bytes_)
