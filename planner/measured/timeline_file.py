"""A measured timeline as a Chrome trace; steps follow one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.measured.events import MeasuredTransfer
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

if TYPE_CHECKING:
    from planner.measured.timeline import MeasuredTimeline


def trace_of(timeline: MeasuredTimeline) -> dict[str, Any]:
    """Return the trace as plain JSON values; ``ts`` and ``dur`` are in microseconds."""
    layout = _Layout(timeline)
    told = {name: getattr(timeline, name) for name in ("model", "cluster", "plan_digest")}
    return trace_object(told, layout.names(), layout.events())


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
