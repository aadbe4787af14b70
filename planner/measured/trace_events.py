"""Chrome trace events of simulated and measured timelines.

A device is a process: thread 0 computes, thread 1 reduces gradients and steps the optimizer, a
counter shows memory. One more process has the links. Times are whole nanoseconds, the resolution of
Perfetto (ui.perfetto.dev), so that an event ends exactly when the next one starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from planner.plan.operations import KIND_LABELS, Operation, stages_label

Event = dict[str, Any]
Span = tuple[int, int]
"""Start and end in nanoseconds."""
COMPUTE_THREAD = 0
STEP_THREAD = 1
LINKS = "links"
_Sent = TypeVar("_Sent")


def nanoseconds(seconds: float) -> int:
    """Round a time to nanoseconds."""
    return round(seconds * 1e9)


def trace_object(
    other_data: Mapping[str, Any], names: Iterable[Event], events: Iterable[Event]
) -> dict[str, Any]:
    """Return a whole trace: names of processes and threads first, then the events by ``ts``."""
    return {
        "displayTimeUnit": "ms",
        "otherData": dict(other_data),
        "traceEvents": [*names, *sorted(events, key=lambda event: event["ts"])],
    }


def device_names(process: int, device: str, stages: Sequence[int]) -> Iterator[Event]:
    """Return the events that name a device's process and threads."""
    yield from _process_name(process, f"{device} ({stages_label(stages)})" if stages else device)
    yield _thread_name(process, COMPUTE_THREAD, "compute")
    yield _thread_name(process, STEP_THREAD, "all-reduce and optimizer")


def hardware_label(process: int, label: str) -> Event:
    """Return the event with the label next to a process's name."""
    return _metadata("process_labels", process, 0, {"labels": label})


def links_names(process: int, threads: Iterable[str]) -> Iterator[Event]:
    """Return the events that name the links' process and threads; none without threads."""
    names = list(threads)
    if names:
        yield from _process_name(process, LINKS)
    for thread, name in enumerate(names):
        yield _thread_name(process, thread, name)


def _process_name(process: int, name: str) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})


def _thread_name(process: int, thread: int, name: str) -> Event:
    return _metadata("thread_name", process, thread, {"name": name})


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def operation_event(process: int, operation: Operation, span: Span, **more: Any) -> Event:
    """Return the event of a forward or backward."""
    category = KIND_LABELS[operation.kind]
    row = _complete(process, COMPUTE_THREAD, str(operation), span, category)
    return {**row, "args": {**operation._asdict(), **more}}


def transfer_event(
    process: int,
    thread: int,
    operation: Operation,
    span: Span,
    *,
    source: str,
    target: str,
    bytes_: int,
    **more: Any,
) -> Event:
    """Return the event of a message between devices, named by the operation that sent it."""
    row = _complete(process, thread, str(operation), span, "transfer")
    ends = {"source": source, "target": target, "bytes": bytes_}
    return {**row, "args": {**operation._asdict(), **ends, **more}}


def reduction_event(
    process: int,
    stages: Sequence[int],
    bytes_: int,
    span: Span,
    *,
    kind: str = "all-reduce",
    **more: Any,
) -> Event:
    """Return the event of an all-reduce, or another kind of collective, on one of its devices."""
    row = _complete(process, STEP_THREAD, f"{kind} {stages_label(stages)}", span, kind)
    return {**row, "args": {"stages": list(stages), "bytes": bytes_, **more}}


def optimizer_event(process: int, span: Span, **more: Any) -> Event:
    """Return the event of a device's optimizer step."""
    row = _complete(process, STEP_THREAD, "optimizer step", span, "optimizer")
    return {**row, "args": more} if more else row


def counter_event(process: int, name: str, at_ns: int, bytes_: int) -> Event:
    """Return a counter event: bytes from this moment on."""
    return {
        "ph": "C",
        "name": name,
        "pid": process,
        "tid": 0,
        "ts": at_ns / 1e3,
        "args": {"bytes": bytes_},
    }


def _complete(process: int, thread: int, name: str, span: Span, category: str) -> Event:
    start, end = span
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "cat": category,
    }


def lanes(
    events: Iterable[_Sent],
    ends: Callable[[_Sent], tuple[float, float]],
    name: Callable[[_Sent, int], str],
) -> dict[str, list[_Sent]]:
    """Assign overlapping events to threads without overlap: each to the first free one.

    Args:
        events: events in order of start.
        ends: returns start and end of an event.
        name: returns the name of a thread for an event and the thread's number, from 1.
    """
    found: dict[str, list[_Sent]] = {}
    for event in events:
        lane = 1
        while (row := found.setdefault(name(event, lane), [])) and (
            ends(row[-1])[1] > ends(event)[0]
        ):
            lane += 1
        row.append(event)
    return found
