"""The measured timeline: start and end of everything that ran on each rank; a Chrome trace file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from planner.errors import PipeplanError, shorten
from planner.measured.chrome_trace import ChromeTrace, Message, Span, lanes, nanoseconds
from planner.measured.events import (
    FORMAT,
    MOST_EVENTS,
    MOST_SECONDS,
    MeasuredDevice,
    MeasuredOperation,
    MeasuredOptimizerStep,
    MeasuredReduction,
    MeasuredStep,
    MeasuredTransfer,
    TimedEvent,
)
from planner.model.figures import Name
from planner.records.document import (
    MOST_MEASURED_OBJECTS,
    Record,
    read_json,
    write_atomically,
)
from planner.records.formats import check_format

_Row = TypeVar("_Row", bound=TimedEvent)


def _in_order(rows: Sequence[_Row]) -> tuple[_Row, ...]:
    """Return a sort key: step and start, then the rest for events at the same time."""
    return tuple(sorted(rows, key=lambda row: tuple(row.__dict__.values())))


def _by(field: str) -> AfterValidator:
    return AfterValidator(lambda rows: tuple(sorted(rows, key=attrgetter(field))))


_InOrder = AfterValidator(_in_order)
_OF_THE_TRACE = ("format", "displayTimeUnit", "otherData", "traceEvents")
_IN_TRACE = ("model", "cluster", "plan_digest")
_Limit = Field(max_length=MOST_EVENTS)


class MeasuredTimeline(Record):
    """One or several iterations of one plan, event by event.

    Attributes:
        plan_digest: :attr:`planner.plan.plan.Plan.execution_digest` of the plan that ran.
        model, cluster: their names, for people.
        emulated: whether operations were emulated by timed waits instead of computed.
        backend: backend of the messages.
        devices: one per rank, in order of rank.
        steps: the measured iterations, in order.
        operations, transfers, reductions, optimizer_steps: the events of all steps, given in any
            order and kept in order of step and start.
    """

    format: Literal["pipeplan-timeline/2"] = "pipeplan-timeline/2"
    plan_digest: Name
    model: Name
    cluster: Name
    emulated: bool
    backend: Literal["gloo", "nccl"]
    devices: Annotated[
        tuple[MeasuredDevice, ...],
        Field(min_length=1, max_length=65536),
        _by("rank"),
    ]
    steps: Annotated[tuple[MeasuredStep, ...], Field(min_length=1), _Limit, _by("step")]
    operations: Annotated[tuple[MeasuredOperation, ...], _Limit, _InOrder]
    transfers: Annotated[tuple[MeasuredTransfer, ...], _Limit, _InOrder] = ()
    reductions: Annotated[tuple[MeasuredReduction, ...], _Limit, _InOrder] = ()
    optimizer_steps: Annotated[tuple[MeasuredOptimizerStep, ...], _Limit, _InOrder] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        problem = next(_problems(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    @classmethod
    def load(cls, path: str | Path) -> MeasuredTimeline:
        """Read a file that :meth:`save` wrote.

        Raises:
            PipeplanError: naming the wrong field, or for another kind of file, such as the
                prediction that ``pipeplan simulate --trace`` writes.
        """
        data, source = read_json(path, most_objects=MOST_MEASURED_OBJECTS), str(path)
        if isinstance(data, dict) and "format" not in data and "traceEvents" in data:
            raise PipeplanError(
                f"{source}: format: a trace without one, such as the prediction that `pipeplan "
                "simulate --trace` writes; give the measured timeline of a run, which the "
                "executor writes with --timeline"
            )
        found = check_format(data, FORMAT, source)
        unknown = found.keys() - {"timeline", *_OF_THE_TRACE}
        if unknown:
            raise PipeplanError(f"{source}: {min(unknown)}: unknown field; measure again")
        if not isinstance(found.get("timeline"), dict):
            raise PipeplanError(
                f"{source}: timeline: expected the measured events, found "
                f"{shorten(found.get('timeline'))}; measure again"
            )
        return cls.parse({"format": FORMAT, **found["timeline"]}, source)

    def save(self, path: str | Path) -> None:
        """Write the timeline as the field ``timeline`` of a Chrome trace, atomically.

        Perfetto shows the trace; only the field is read again.
        """
        fields = self.model_dump(mode="json", exclude={"format"})
        data = {"format": FORMAT, **self.trace(), "timeline": fields}
        write_atomically(path, json.dumps(data, ensure_ascii=False) + "\n")

    def trace(self) -> dict[str, Any]:
        """Return the timeline as a Chrome trace, in plain JSON values; steps follow each other."""
        stages: dict[str, set[int]] = {device.name: set() for device in self.devices}
        for event in self.operations:
            stages[event.device].add(event.what.stage)
        labels = {device.name: f"rank {device.rank}, {device.hardware}" for device in self.devices}
        trace = ChromeTrace({name: sorted(rows) for name, rows in stages.items()}, labels)
        starts, now = {}, 0
        for step, length_s in self.lengths_s.items():
            starts[step] = now
            now += nanoseconds(length_s)

        def span(event: TimedEvent) -> Span:
            begin = starts[event.step]
            return begin + nanoseconds(event.start_s), begin + nanoseconds(event.end_s)

        for op in self.operations:
            inside = {} if op.collective_s is None else {"collective_s": op.collective_s}
            trace.operation(op.device, op.what, span(op), step=op.step, **inside)
        for row in self.reductions:
            trace.reduction(row.device, row.stages, row.bytes, span(row), step=row.step)
        for update in self.optimizer_steps:
            trace.optimizer(update.device, span(update), step=update.step)
        messages = (
            Message(
                sent.what, span(sent), sent.source, sent.target, sent.bytes, {"step": sent.step}
            )
            for sent in self.transfers
        )
        # A message may overlap the next one.
        trace.links(lanes(messages, lambda row: row.span, _thread_name))
        for one in self.steps:
            for name, bytes_ in one.peak_memory_bytes.items():
                trace.memory(name, "peak memory", starts[one.step], bytes_)
        return trace.data({name: getattr(self, name) for name in _IN_TRACE})

    @cached_property
    def counted_steps(self) -> tuple[int, ...]:
        """The steps that count: without the first, which is a warm-up, if there are 3 or more."""
        numbers = tuple(row.step for row in self.steps)
        return numbers[1:] if len(numbers) >= 3 else numbers

    @cached_property
    def lengths_s(self) -> dict[int, float]:
        """Length of each step: its iteration time, or the end of its last event if later."""
        lengths = {row.step: row.iteration_time_s for row in self.steps}
        for events in (self.operations, self.transfers, self.reductions, self.optimizer_steps):
            for event in events:
                lengths[event.step] = max(lengths[event.step], event.end_s)
        return lengths


def _thread_name(row: Message, lane: int) -> str:
    name = f"{row.source}>{row.target}"
    return name if lane == 1 else f"{name} ({lane})"


def _problems(timeline: MeasuredTimeline) -> Iterator[str]:
    yield from _wrong_devices(timeline)
    yield from _unknown_names(timeline)
    yield from _wrong_steps(timeline)
    yield from _wrong_transfers(timeline.transfers)
    rows: tuple[tuple[str, Sequence[Any], Callable[[Any], Hashable]], ...] = (
        ("operations", timeline.operations, lambda e: (e.step, e.operation)),
        ("transfers", timeline.transfers, lambda e: (e.step, e.source, e.target, e.operation)),
        ("reductions", timeline.reductions, lambda e: (e.step, e.device, e.stages)),
        ("optimizer_steps", timeline.optimizer_steps, lambda e: (e.step, e.device)),
    )
    for field, events, key in rows:
        yield from _twice(field, map(key, events))


def _wrong_devices(timeline: MeasuredTimeline) -> Iterator[str]:
    yield from _twice("devices", (device.name for device in timeline.devices))
    for place, device in enumerate(timeline.devices):
        if device.rank != place:
            yield (
                f"devices: rank {place} is missing, found rank {device.rank} in its place; give "
                "one device for every rank from 0"
            )


def _wrong_steps(timeline: MeasuredTimeline) -> Iterator[str]:
    yield from _twice("steps", (row.step for row in timeline.steps))
    total_s = sum(timeline.lengths_s.values())
    if total_s > MOST_SECONDS:
        yield f"steps: {total_s:g} s in all, expected at most {MOST_SECONDS:g}; keep fewer steps"


def _unknown_names(timeline: MeasuredTimeline) -> Iterator[str]:
    steps = {row.step for row in timeline.steps}
    devices = {device.name for device in timeline.devices}
    for row in timeline.steps:
        yield from _unknown("steps", "peak_memory_bytes", row.peak_memory_bytes, devices)
        yield from _unknown("steps", "batch_wait_s", row.batch_wait_s, devices)
    for field in ("operations", "transfers", "reductions", "optimizer_steps"):
        for event in getattr(timeline, field):
            yield from _unknown(field, "step", [event.step], steps)
            for name in ("device", "source", "target"):
                if hasattr(event, name):
                    yield from _unknown(field, name, [getattr(event, name)], devices)


def _unknown(field: str, name: str, found: Iterable[Hashable], known: set[Any]) -> Iterator[str]:
    for value in found:
        if value not in known:
            listed = "steps" if name == "step" else "devices"
            yield f"{field}: {name} {value!r} is not in {listed}; correct it or add it there"


def _wrong_transfers(transfers: Iterable[MeasuredTransfer]) -> Iterator[str]:
    for event in transfers:
        if event.what.kind not in "FB":
            yield (
                f"transfers: operation {event.operation!r} hands on nothing; name activations by "
                "F, gradients by B"
            )
        if event.source == event.target:
            yield f"transfers: one goes from {event.source!r} to itself; leave it out"


def _twice(field: str, keys: Iterable[Hashable]) -> Iterator[str]:
    key, count = next(iter(Counter(keys).most_common(1)), (None, 0))
    if count > 1:
        yield f"{field}: {count} of them are of {key!r}; give one, with all its bytes"
