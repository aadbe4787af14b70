"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) opens.

A device is a process: thread 0 computes, thread 1 reduces gradients and steps the optimizer, a
counter shows memory. One more process has a thread for every link resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from planner.artifacts.document import write_atomically
from planner.report.names import stages_label
from planner.report.palette import KIND_LABELS
from planner.simulator import Timeline, TransferEvent

Event = dict[str, Any]
COMPUTE_THREAD = 0
STEP_THREAD = 1
LINKS = "links"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as plain JSON values; ``ts`` and ``dur`` are in microseconds.

    Times are rounded to whole nanoseconds, Perfetto's resolution, so that an event ends exactly
    where the next one starts. Transfers that take no time are left out.

    Returns:
        An object with ``traceEvents`` in order of ``ts``, names of processes and threads first.
    """
    events = [*_operations(timeline), *_steps(timeline), *_links(timeline), *_memory(timeline)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": timeline.pipeline.problem.graph.name,
            "cluster": timeline.pipeline.problem.cluster.name,
            "iteration_time_s": timeline.iteration_time_s,
            "bubble": timeline.bubble,
        },
        "traceEvents": [*_names(timeline), *sorted(events, key=lambda event: event["ts"])],
    }


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write :func:`chrome_trace` as JSON, atomically.

    Raises:
        PipeplanError: if the file cannot be written.
    """
    write_atomically(path, json.dumps(chrome_trace(timeline), ensure_ascii=False) + "\n")


def _process_ids(timeline: Timeline) -> dict[str, int]:
    """By device; from 1, since viewers take process 0 for the idle one."""
    return {device: index for index, device in enumerate(timeline.pipeline.devices, 1)}


def _links_process(timeline: Timeline) -> int:
    return len(timeline.pipeline.devices) + 1


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _complete(process: int, thread: int, name: str, start_s: float, end_s: float) -> Event:
    start, end = _nanoseconds(start_s), _nanoseconds(end_s)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }


def _names(timeline: Timeline) -> Iterator[Event]:
    for device, process in _process_ids(timeline).items():
        stages = stages_label(timeline.pipeline.stages_on[device])
        yield from _process_name(process, f"{device} ({stages})")
        yield _thread_name(process, COMPUTE_THREAD, "compute")
        yield _thread_name(process, STEP_THREAD, "all-reduce and optimizer")
    threads = _link_threads(timeline)
    if threads:
        yield from _process_name(_links_process(timeline), LINKS)
    for thread, name in enumerate(threads):
        yield _thread_name(_links_process(timeline), thread, name)


def _process_name(process: int, name: str) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})


def _thread_name(process: int, thread: int, name: str) -> Event:
    return _metadata("thread_name", process, thread, {"name": name})


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _operations(timeline: Timeline) -> Iterator[Event]:
    processes = _process_ids(timeline)
    for event in timeline.operations:
        operation = event.operation
        yield {
            **_complete(
                processes[event.device],
                COMPUTE_THREAD,
                str(operation),
                event.start_s,
                event.end_s,
            ),
            "cat": KIND_LABELS[operation.kind],
            "args": operation._asdict(),
        }


def _steps(timeline: Timeline) -> Iterator[Event]:
    """All-reduces, once on every device that takes part, and optimizer steps."""
    processes = _process_ids(timeline)
    for event in timeline.synchronisations:
        what = event.synchronisation
        name = f"all-reduce {stages_label(what.stages)}"
        for device in what.devices:
            yield {
                **_complete(processes[device], STEP_THREAD, name, event.start_s, event.end_s),
                "cat": "all-reduce",
                "args": {"stages": list(what.stages), "bytes": what.bytes},
            }
    for device, end_s in timeline.end_s.items():
        start_s = end_s - timeline.pipeline.optimizer_s[device]
        yield {
            **_complete(processes[device], STEP_THREAD, "optimizer step", start_s, end_s),
            "cat": "optimizer",
        }


def _link_threads(timeline: Timeline) -> dict[str, list[TransferEvent]]:
    """Transfers by the thread that shows them: each link resource of the route has one."""
    cluster = timeline.pipeline.problem.cluster
    moving = [event for event in timeline.transfers if event.end_s > event.start_s]
    resources = sorted({link for event in moving for link in event.links})
    # Parallel links between the same ends differ by their index alone.
    names = {link: f"{cluster.link_name(link)} (link {link[0]})" for link in resources}
    threads: dict[str, list[TransferEvent]] = {name: [] for name in names.values()}
    for event in moving:
        for link in event.links:
            threads[names[link]].append(event)
    return {**threads, **_lanes(event for event in moving if not event.links)}


def _lanes(transfers: Iterable[TransferEvent]) -> dict[str, list[TransferEvent]]:
    """Transfers over shared links may overlap; each goes to the first lane that is free."""
    lanes: dict[str, list[TransferEvent]] = {}
    for event in transfers:
        lane = 1
        while (name := f"{event.source}>{event.target} (shared, {lane})") in lanes:
            if lanes[name][-1].end_s <= event.start_s:
                break
            lane += 1
        lanes.setdefault(name, []).append(event)
    return lanes


def _links(timeline: Timeline) -> Iterator[Event]:
    process = _links_process(timeline)
    for thread, transfers in enumerate(_link_threads(timeline).values()):
        for event in transfers:
            yield {
                **_complete(process, thread, str(event.operation), event.start_s, event.end_s),
                "cat": "transfer",
                "args": {
                    **event.operation._asdict(),
                    "source": event.source,
                    "target": event.target,
                    "bytes": _bytes_moved(timeline, event),
                },
            }


def _bytes_moved(timeline: Timeline, event: TransferEvent) -> int:
    stage = timeline.pipeline.stages[event.operation.stage]
    return stage.output_bytes if event.operation.kind == "F" else stage.input_gradient_bytes


def _memory(timeline: Timeline) -> Iterator[Event]:
    processes = _process_ids(timeline)
    for device, steps in timeline.memory.items():
        for time_s, bytes_ in steps:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": processes[device],
                "tid": 0,
                "ts": _nanoseconds(time_s) / 1e3,
                "args": {"bytes": bytes_},
            }
