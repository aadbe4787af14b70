"""Conversion of a measured timeline to a Chrome trace and back; steps follow one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from planner.errors import PipeplanError, shorten
from planner.measured.events import (
    FORMAT,
    MeasuredDevice,
    MeasuredStep,
    MeasuredTransfer,
    Seconds,
    Step,
)
from planner.measured.trace_events import (
    Event,
    Span,
    counter_event,
    device_names,
    hardware_label,
    lanes,
    links_names,
    nanoseconds,
    operation_event,
    optimizer_event,
    reduction_event,
    trace_object,
    transfer_event,
)
from planner.model.figures import Name
from planner.plan.operations import KIND_LABELS, Kind, Operation
from planner.records.document import Count, Record

if TYPE_CHECKING:
    from planner.measured.timeline import MeasuredTimeline

REMEDY = "a measured timeline is not for editing: measure again"


def trace_of(timeline: MeasuredTimeline) -> dict[str, Any]:
    """Return the trace as plain JSON values; ``ts`` and ``dur`` are in microseconds."""
    layout = _Layout(timeline)
    trace = trace_object(_other_data(layout), layout.names(), layout.events())
    return {"format": FORMAT, **trace}


class _Layout:
    """The position of each event of a timeline on the trace."""

    def __init__(self, timeline: MeasuredTimeline) -> None:
        self.timeline = timeline
        self.process = {device.name: n for n, device in enumerate(timeline.devices, 1)}
        self.links_process = len(timeline.devices) + 1
        self.start_ns = _starts_ns(timeline)
        self.link_threads = lanes(timeline.transfers, self._span_of, _lane_name)

    def _span_of(self, event: Any) -> Span:
        start = self.start_ns[event.step]
        return start + nanoseconds(event.start_s), start + nanoseconds(event.end_s)

    def names(self) -> Iterator[Event]:
        stages: dict[str, set[int]] = {name: set() for name in self.process}
        for event in self.timeline.operations:
            stages[event.device].add(event.what.stage)
        for device in self.timeline.devices:
            process = self.process[device.name]
            yield from device_names(process, device.name, sorted(stages[device.name]))
            yield hardware_label(process, f"rank {device.rank}, {device.hardware}")
        yield from links_names(self.links_process, self.link_threads)

    def events(self) -> Iterator[Event]:
        process = self.process
        for op in self.timeline.operations:
            told = {} if op.collective_s is None else {"collective_s": op.collective_s}
            yield operation_event(
                process[op.device], op.what, self._span_of(op), step=op.step, **told
            )
        for reduction in self.timeline.reductions:
            where, span = process[reduction.device], self._span_of(reduction)
            stages, bytes_ = reduction.stages, reduction.bytes
            yield reduction_event(where, stages, bytes_, span, step=reduction.step)
        for update in self.timeline.optimizer_steps:
            yield optimizer_event(process[update.device], self._span_of(update), step=update.step)
        yield from self._transfers()
        yield from self._memory()

    def _transfers(self) -> Iterator[Event]:
        for thread, transfers in enumerate(self.link_threads.values()):
            for event in transfers:
                yield transfer_event(
                    self.links_process,
                    thread,
                    event.what,
                    self._span_of(event),
                    source=event.source,
                    target=event.target,
                    bytes_=event.bytes,
                    step=event.step,
                )

    def _memory(self) -> Iterator[Event]:
        for row in self.timeline.steps:
            for device, bytes_ in row.peak_memory_bytes.items():
                at_ns = self.start_ns[row.step]
                yield counter_event(self.process[device], "peak memory", at_ns, bytes_)


def _lane_name(event: MeasuredTransfer, lane: int) -> str:
    """Return the name of a thread for messages, since a message may overlap the next one."""
    name = f"{event.source}>{event.target}"
    return name if lane == 1 else f"{name} ({lane})"


def _starts_ns(timeline: MeasuredTimeline) -> dict[int, int]:
    """Return the start of each step, which is the end of the one before."""
    starts, now = {}, 0
    for step, length_s in timeline.lengths_s.items():
        starts[step] = now
        now += nanoseconds(length_s)
    return starts


def _other_data(layout: _Layout) -> dict[str, Any]:
    fields = {"format", "operations", "transfers", "reductions", "optimizer_steps", "steps"}
    steps = [
        {**row.model_dump(mode="json"), "start_s": layout.start_ns[row.step] / 1e9}
        for row in layout.timeline.steps
    ]
    return {**layout.timeline.model_dump(mode="json", exclude=fields), "steps": steps}


Microseconds = Annotated[float, Field(ge=0, le=1e13)]
Place = Annotated[int, Field(ge=0, lt=2**31)]


class _PlacedStep(MeasuredStep):
    start_s: Annotated[float, Field(ge=0, le=1e7)]


class _Header(Record):
    plan_digest: Name
    model: Name
    cluster: Name
    emulated: bool
    backend: Name
    devices: Annotated[tuple[MeasuredDevice, ...], Field(min_length=1)]
    steps: Annotated[tuple[_PlacedStep, ...], Field(min_length=1)]


class _Trace(Record):
    format: Name
    displayTimeUnit: Literal["ms"]  # noqa: N815 - the trace format's own name
    otherData: _Header  # noqa: N815 - the same
    traceEvents: tuple[dict[str, Any], ...]  # noqa: N815 - the same


class _Arguments(Record):
    step: Step
    stage: Count | None = None
    kind: Kind | None = None
    microbatch: Count | None = None
    collective_s: Seconds | None = None
    source: Name | None = None
    target: Name | None = None
    bytes: Count | None = None
    stages: tuple[Count, ...] | None = None


class _Complete(Record):
    ph: Literal["X"]
    name: str
    pid: Place
    tid: Place
    ts: Microseconds
    dur: Microseconds
    cat: str
    args: _Arguments


def parse_trace(
    data: Mapping[str, Any],
    source: str,
    parse: Callable[[Mapping[str, Any], str], MeasuredTimeline],
) -> MeasuredTimeline:
    """Parse the timeline from a trace of :func:`trace_of`.

    Args:
        data: plain JSON values.
        source: name of the data, for messages.
        parse: makes a timeline of its fields.

    Raises:
        PipeplanError: naming the field that is wrong or inconsistent with others.
    """
    trace = _Trace.parse(data, source)
    timeline = parse(_Reader(trace, source).fields(), source)
    expected = trace_of(timeline)
    # Most files are equal as text, which is soon seen.
    equal = json.dumps(expected) == json.dumps(data)
    difference = None if equal else _first_difference(expected, data, "")
    if difference is not None:
        raise PipeplanError(f"{source}: {difference}; {REMEDY}")
    return timeline


class _Reader:
    """Sorts the events of a trace by category."""

    def __init__(self, trace: _Trace, source: str) -> None:
        self.trace = trace
        self.source = source
        header = trace.otherData
        self.devices = [device.name for device in header.devices]
        self.start_ns = {row.step: nanoseconds(row.start_s) for row in header.steps}

    def fields(self) -> dict[str, Any]:
        header = self.trace.otherData.model_dump(mode="json")
        for row in header["steps"]:
            del row["start_s"]
        return {"format": FORMAT, **header, **self._events()}

    def _events(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {
            field: [] for field in ("operations", "transfers", "reductions", "optimizer_steps")
        }
        for index, raw in enumerate(self.trace.traceEvents):
            if raw.get("ph") not in ("M", "C"):
                field, row = self._event(raw, f"{self.source}: traceEvents[{index}]")
                found[field].append(row)
        return found

    def _event(self, raw: Event, place: str) -> tuple[str, Event]:
        event = _Complete.parse(raw, place)
        field = _CATEGORIES.get(event.cat)
        if field is None:
            known = ", ".join(_CATEGORIES)
            raise PipeplanError(f"{place}: cat: {shorten(event.cat)} is none of {known}; {REMEDY}")
        given = event.args.model_dump(mode="json", exclude_unset=True)
        row = {name: value for name, value in given.items() if name not in Operation._fields}
        row |= self._times(event, event.args.step, place)
        if field in ("operations", "transfers"):
            row["operation"] = event.name
        if field != "transfers":
            row["device"] = self._device(event.pid, place)
        return field, row

    def _times(self, event: _Complete, step: int, place: str) -> dict[str, float]:
        if step not in self.start_ns:
            raise PipeplanError(f"{place}: args.step: {step} is not in otherData.steps; {REMEDY}")
        start = round(event.ts * 1e3) - self.start_ns[step]
        if start < 0:
            raise PipeplanError(f"{place}: ts: {event.ts} is before its step {step}; {REMEDY}")
        return {"start_s": start / 1e9, "end_s": (start + round(event.dur * 1e3)) / 1e9}

    def _device(self, process: int, place: str) -> str:
        if not 1 <= process <= len(self.devices):
            raise PipeplanError(
                f"{place}: pid: {process} is not one of the {len(self.devices)} devices; {REMEDY}"
            )
        return self.devices[process - 1]


_CATEGORIES = {
    **dict.fromkeys(KIND_LABELS.values(), "operations"),
    "transfer": "transfers",
    "all-reduce": "reductions",
    "optimizer": "optimizer_steps",
}


def _first_difference(expected: Any, found: Any, field: str) -> str | None:
    """Describe where two JSON values differ; None if they are equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs: Iterable[tuple[str, Any, Any]] = (
            (f"{field}.{key}", expected.get(key), found.get(key))
            for key in dict.fromkeys([*expected, *found])
        )
    elif isinstance(expected, list) and isinstance(found, list):
        rows = enumerate(zip_longest(expected, found))
        pairs = ((f"{field}[{index}]", *pair) for index, pair in rows)
    elif expected == found and isinstance(expected, bool) == isinstance(found, bool):
        return None
    else:
        name = field.lstrip(".")
        return f"{name}: expected {shorten(expected)} by the rest, found {shorten(found)}"
    return next(
        (text for name, a, b in pairs if (text := _first_difference(a, b, name)) is not None), None
    )
