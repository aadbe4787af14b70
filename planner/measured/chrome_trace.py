"""A Chrome trace of a timeline, simulated or measured, which Perfetto (ui.perfetto.dev) opens.

A device is a process: thread 0 computes, thread 1 reduces gradients and steps the optimizer, a
counter shows memory. One more process has the links. Times are whole nanoseconds, the resolution of
Perfetto, so that an event ends exactly when the next one starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from planner.plan.operations import KIND_LABELS, Operation, stages_label

Event = dict[str, Any]
Span = tuple[int, int]
"""Start and end in nanoseconds."""
COMPUTE, STEP = 0, 1
"""Threads of a device."""
_Row = TypeVar("_Row")


def nanoseconds(seconds: float) -> int:
    """Round a time to nanoseconds."""
    return round(seconds * 1e9)


class Message(NamedTuple):
    """A message between devices, named by the operation that sent it; more goes to its figures."""

    operation: Operation
    span: Span
    source: str
    target: str
    bytes: int
    more: Mapping[str, Any]


class ChromeTrace:
    """The events of a trace, as they are added.

    Args:
        stages_on: the stages of each device, in the order of the trace.
        labels: shown beside the names of devices.
    """

    def __init__(
        self, stages_on: Mapping[str, Sequence[int]], labels: Mapping[str, str] | None = None
    ) -> None:
        self._names: list[Event] = []
        self._events: list[Event] = []
        # From 1, since viewers take process 0 for the idle one.
        self._process = {device: number for number, device in enumerate(stages_on, 1)}
        for device, stages in stages_on.items():
            process = self._process[device]
            self._name_process(process, f"{device} ({stages_label(stages)})" if stages else device)
            self._name("thread_name", process, COMPUTE, name="compute")
            self._name("thread_name", process, STEP, name="all-reduce and optimizer")
            if labels is not None:
                self._name("process_labels", process, labels=labels[device])

    def operation(self, device: str, operation: Operation, span: Span, **more: Any) -> None:
        """Add a forward or backward."""
        figures = {**operation._asdict(), **more}
        kind = KIND_LABELS[operation.kind]
        self._add(self._process[device], COMPUTE, str(operation), span, kind, figures)

    def reduction(
        self,
        device: str,
        stages: Sequence[int],
        bytes_: int,
        span: Span,
        kind: str = "all-reduce",
        **more: Any,
    ) -> None:
        """Add an all-reduce, or another kind of collective, on one of its devices."""
        name, figures = f"{kind} {stages_label(stages)}", {"stages": list(stages), "bytes": bytes_}
        self._add(self._process[device], STEP, name, span, kind, {**figures, **more})

    def optimizer(self, device: str, span: Span, **more: Any) -> None:
        """Add a device's optimizer step."""
        self._add(self._process[device], STEP, "optimizer step", span, "optimizer", more)

    def memory(self, device: str, name: str, at_ns: int, bytes_: int) -> None:
        """Add the bytes of a device from a moment on."""
        row = {"ph": "C", "name": name, "pid": self._process[device], "tid": 0, "ts": at_ns / 1e3}
        self._events.append({**row, "args": {"bytes": bytes_}})

    def links(self, threads: Mapping[str, Iterable[Message]]) -> None:
        """Add the links' process, once; the messages of a thread do not overlap."""
        process = len(self._process) + 1
        if threads:
            self._name_process(process, "links")
        for thread, (name, messages) in enumerate(threads.items()):
            self._name("thread_name", process, thread, name=name)
            for row in messages:
                ends = {"source": row.source, "target": row.target, "bytes": row.bytes}
                figures = {**row.operation._asdict(), **ends, **row.more}
                self._add(process, thread, str(row.operation), row.span, "transfer", figures)

    def data(self, other_data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trace as plain JSON values; ``ts`` and ``dur`` are in microseconds.

        Args:
            other_data: figures of the whole.

        Returns:
            An object with ``traceEvents`` in order of ``ts``, names of processes and threads first.
        """
        return {
            "displayTimeUnit": "ms",
            "otherData": dict(other_data),
            "traceEvents": [*self._names, *sorted(self._events, key=lambda event: event["ts"])],
        }

    def _name_process(self, process: int, name: str) -> None:
        self._name("process_name", process, name=name)
        self._name("process_sort_index", process, sort_index=process)

    def _name(self, kind: str, process: int, thread: int = 0, **arguments: Any) -> None:
        row = {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}
        self._names.append(row)

    def _add(
        self, process: int, thread: int, name: str, span: Span, kind: str, figures: Event
    ) -> None:
        start, end = span
        row = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start / 1e3}
        row |= {"dur": (end - start) / 1e3, "cat": kind}
        self._events.append({**row, "args": figures} if figures else row)


def lanes(
    rows: Iterable[_Row],
    ends: Callable[[_Row], tuple[float, float]],
    name: Callable[[_Row, int], str],
) -> dict[str, list[_Row]]:
    """Assign overlapping events to threads without overlap: each to the first free one.

    Args:
        rows: events in order of start.
        ends: returns start and end of an event.
        name: returns the name of a thread for an event and the thread's number, from 1.
    """
    found: dict[str, list[_Row]] = {}
    for event in rows:
        lane = 1
        while (row := found.setdefault(name(event, lane), [])) and (
            ends(row[-1])[1] > ends(event)[0]
        ):
            lane += 1
        row.append(event)
    return found
