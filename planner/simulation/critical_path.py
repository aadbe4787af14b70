"""The critical path: a chain of events without a gap from time 0 to the end of the iteration.

In a replay nothing starts later than it must, so whatever starts after time 0 starts exactly when
something it waited for ended, or had made the gradients to reduce. Following these moments back
from the end gives the path. Times are compared exactly, since the simulator passes them on without
arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from planner.plan.operations import Operation
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
    gradients_ready_s,
)


@dataclass(frozen=True)
class OptimizerEvent:
    """The optimizer step of a device."""

    device: str
    start_s: float
    end_s: float


Event = OperationEvent | TransferEvent | SynchronisationEvent | OptimizerEvent
Wait = Literal[
    "nothing", "device", "tensor", "producer", "link", "last backward", "network", "reduction"
]
_WAITS: dict[tuple[type, type], Wait] = {
    (OperationEvent, OperationEvent): "device",
    (TransferEvent, OperationEvent): "tensor",
    (OperationEvent, TransferEvent): "producer",
    (TransferEvent, TransferEvent): "link",
    (OperationEvent, SynchronisationEvent): "last backward",
    (SynchronisationEvent, SynchronisationEvent): "network",
    (OperationEvent, OptimizerEvent): "device",
    (SynchronisationEvent, OptimizerEvent): "reduction",
}


@dataclass(frozen=True)
class PathStep:
    """An event on the critical path and what it waited for, which ended when the event started.

    Attributes:
        event: the event; of a backward that still runs when gradients of its first layers are
            reduced, the part until then.
        waited_for: the ``device`` (the operation before it in the device's order), a ``tensor`` in
            transfer, the ``producer`` of a sent tensor, a ``link`` (a transfer before it), the
            ``last backward`` of the gradients to reduce, the ``network`` (a reduction before it), a
            ``reduction`` before the optimizer step; ``nothing`` at time 0.
    """

    event: Event
    waited_for: Wait

    @property
    def seconds(self) -> float:
        """Duration of the event."""
        return self.event.end_s - self.event.start_s


def critical_path(timeline: Timeline) -> tuple[PathStep, ...]:
    """Return the events that make up the iteration time, in order of time.

    Durations sum to the iteration time. Among several such paths, the one that prefers staying on a
    device over following a tensor, and a producer over a link.
    """
    causes = Causes(timeline)
    return _steps(causes.chain(causes.last_event()))


def _steps(events: list[Event]) -> tuple[PathStep, ...]:
    waits: list[Wait] = ["nothing"]
    waits += [_WAITS[type(first), type(second)] for first, second in pairwise(events)]
    return tuple(PathStep(event, wait) for event, wait in zip(events, waits, strict=True))


class Causes:
    """The events that each event of a timeline waited for and that ended when it started."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._runs = {event.operation: event for event in timeline.operations}
        self._before: dict[Operation, OperationEvent] = {}
        self._last: dict[str, OperationEvent] = {}
        self._backwards: defaultdict[tuple[int, str], list[OperationEvent]] = defaultdict(list)
        for event in timeline.operations:
            self._note_operation(event)
        self._arrivals: dict[Operation, TransferEvent] = {}
        self._ends_on: defaultdict[tuple[tuple[int, int], float], list[TransferEvent]]
        self._ends_on = defaultdict(list)
        for transfer in timeline.transfers:
            self._note_transfer(transfer)

    def _note_operation(self, event: OperationEvent) -> None:
        if event.device in self._last:
            self._before[event.operation] = self._last[event.device]
        self._last[event.device] = event
        if event.operation.kind in "BW":
            self._backwards[event.operation.stage, event.device].append(event)

    def _note_transfer(self, event: TransferEvent) -> None:
        stage, kind, microbatch = event.operation
        step = 1 if kind == "F" else -1
        self._arrivals[Operation(stage + step, kind, microbatch)] = event
        for link in event.links:
            self._ends_on[link, event.end_s].append(event)

    def chain(self, event: Event, until_s: float = 0.0) -> list[Event]:
        """Return a chain of events without gaps that ends with the given event.

        Each event waited for the one before it.

        Args:
            event: an event of the timeline, or an optimizer step.
            until_s: the first event of the chain runs at this time, or starts at it.
        """
        trail = [(event, self.of(event))]
        seen: set[Event] = {event}
        # Events that take no time may wait for each other in a circle, so dead ends are possible.
        while trail[-1][0].start_s > until_s:
            before = next((cause for cause in trail[-1][1] if cause not in seen), None)
            if before is None:
                trail.pop()
                continue
            seen.add(before)
            trail.append((before, self.of(before)))
        return [found for found, _ in reversed(trail)]

    def last_event(self) -> OptimizerEvent:
        """Return the optimizer step that ends the iteration."""
        ends = self._timeline.end_s
        return self.optimizer_event(max(ends, key=lambda name: ends[name]))

    def optimizer_event(self, device: str) -> OptimizerEvent:
        """Return the optimizer step of a device; it may take no time."""
        start_s = max((event.end_s for event in self._before_optimizer(device)), default=0.0)
        return OptimizerEvent(device, start_s, self._timeline.end_s[device])

    def of(self, event: Event) -> Iterator[Event]:
        """Yield the causes of an event, the likeliest first."""
        match event:
            case OperationEvent():
                found = self._before_operation(event)
            case TransferEvent():
                found = self._before_transfer(event)
            case SynchronisationEvent():
                found = self._before_reduction(event)
            case OptimizerEvent():
                found = self._before_optimizer(event.device)
        return (cause for cause in found if cause.end_s == event.start_s)

    def _before_operation(self, event: OperationEvent) -> Iterator[Event]:
        stage, kind, microbatch = event.operation
        if event.operation in self._before:
            yield self._before[event.operation]
        arrival = self._arrivals.get(Operation(stage, "B" if kind == "I" else kind, microbatch))
        if arrival is not None:
            yield arrival

    def _before_transfer(self, event: TransferEvent) -> Iterator[Event]:
        whole = self._runs.get(event.operation)
        # A gradient is named after the whole backward, also where the input gradient sends it.
        yield whole or self._runs[event.operation._replace(kind="I")]
        for link in event.links:
            rivals = self._ends_on[link, event.start_s]
            yield from sorted(rivals, key=lambda rival: rival.start_s)

    def _before_reduction(self, event: SynchronisationEvent) -> Iterator[Event]:
        members = event.synchronisation
        for stage in members.stages:
            for device in members.devices:
                for backward in self._backwards[stage, device][-1:]:
                    yield replace(backward, end_s=gradients_ready_s(members, backward))
        for other in self._timeline.synchronisations:
            if not set(members.devices).isdisjoint(other.synchronisation.devices):
                yield other

    def _before_optimizer(self, device: str) -> Iterator[Event]:
        if device in self._last:
            yield self._last[device]
        for event in self._timeline.synchronisations:
            if device in event.synchronisation.devices:
                yield event
