"""The critical path: a chain of events without a gap from time 0 to the end of the iteration.

In a replay nothing starts later than it must, so whatever starts after time 0 starts exactly when
something it waited for ended, or had made the gradients to reduce. Following these moments back
from the end gives the path. Times are compared exactly, since the simulator passes them on without
arithmetic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from planner.costs.placed_pipeline import PlacedPipeline, Resource
from planner.plan.operations import Operation
from planner.simulation.timeline import (
    CopyEvent,
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)


@dataclass(frozen=True)
class OptimizerEvent:
    """The optimizer step of a device."""

    device: str
    start_s: float
    end_s: float


Event = OperationEvent | TransferEvent | SynchronisationEvent | OptimizerEvent | CopyEvent
Wait = Literal[
    "nothing",
    "device",
    "tensor",
    "send",
    "producer",
    "receiver",
    "link",
    "last backward",
    "network",
    "reduction",
    "optimizer step",
    "stash",
    "host link",
    "replica",
]
_WAITS: dict[tuple[type, type], Wait] = {
    (OperationEvent, OperationEvent): "device",
    (TransferEvent, OperationEvent): "tensor",
    (OperationEvent, TransferEvent): "producer",
    (TransferEvent, TransferEvent): "link",
    (OperationEvent, SynchronisationEvent): "last backward",
    (TransferEvent, SynchronisationEvent): "send",
    (SynchronisationEvent, SynchronisationEvent): "network",
    (OperationEvent, OptimizerEvent): "device",
    (TransferEvent, OptimizerEvent): "send",
    (SynchronisationEvent, OptimizerEvent): "reduction",
    (OptimizerEvent, SynchronisationEvent): "optimizer step",
    (CopyEvent, OperationEvent): "stash",
    (OperationEvent, CopyEvent): "device",
    (TransferEvent, CopyEvent): "tensor",
    (CopyEvent, CopyEvent): "host link",
}


@dataclass(frozen=True)
class PathStep:
    """An event on the critical path and what it waited for, which ended when the event started.

    Attributes:
        event: the event; of a backward that still runs when gradients of its first layers are
            reduced, the part until then.
        waited_for: the ``device`` (the operation before it in the device's order), a ``tensor`` in
            transfer, the ``producer`` of a sent tensor, a ``link`` (the transfer before it, of its
            pair of devices where links are shared), the ``last backward`` of the gradients to
            reduce, the ``network`` (a reduction or an all-gather before it), a ``reduction`` before
            the optimizer step, the ``optimizer step`` before an all-gather; ``nothing`` at time 0.
            Where messages block, also a ``send`` of its device (any message but the one it needs),
            and the ``receiver`` of a message (the operation before it there). A backward may wait
            for its ``stash`` to come back from the host, and that copy for the ``host link`` (the
            copy before), or for what the operation waited for that it began with. Where replicas
            divide weights, an operation may wait for a ``replica``: for what another's waited for.
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
    waits: list[Wait] = ["nothing", *(_wait(first, second) for first, second in pairwise(events))]
    return tuple(PathStep(event, wait) for event, wait in zip(events, waits, strict=True))


def _wait(first: Event, second: Event) -> Wait:
    """Return what the second event waited for, which was the first."""
    match first, second:
        case OperationEvent(), OperationEvent() if first.device != second.device:
            return "replica"
        case TransferEvent(), OperationEvent() if second.device not in (first.source, first.target):
            return "replica"
        case TransferEvent(), OperationEvent() if first.consumer != _as_sent(second.operation):
            return "send"
        case OperationEvent(), TransferEvent() if first.device != second.source:
            return "receiver"
    return _WAITS[type(first), type(second)]


def _as_sent(operation: Operation) -> Operation:
    """Return an operation as the message that it needs is named: gradients go to a backward."""
    return operation._replace(kind="B") if operation.kind == "I" else operation


class Causes:
    """The events that each event of a timeline waited for and that ended when it started."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        behaviour = timeline.pipeline.behaviour
        self._sends_block, self._blocks = behaviour.send == "blocking", behaviour.blocks
        self._ran_until: dict[tuple[str, float], OperationEvent] = {}
        self._messages_until: defaultdict[tuple[str, float], list[TransferEvent]]
        self._messages_until = defaultdict(list)
        self._runs = {event.operation: event for event in timeline.operations}
        self._before: dict[Operation, OperationEvent] = {}
        self._last: dict[str, OperationEvent] = {}
        self._backwards: defaultdict[tuple[int, str], list[OperationEvent]] = defaultdict(list)
        for event in timeline.operations:
            self._note_operation(event)
        self._arrivals: dict[Operation, TransferEvent] = {}
        self._ends_on: defaultdict[tuple[Resource, float], list[TransferEvent]]
        self._ends_on = defaultdict(list)
        for transfer in timeline.transfers:
            self._note_transfer(transfer)
        self._partners = _partners_of(timeline)
        self._copies = {event.operation: event for event in timeline.copies}
        self._copied_until = {(row.device, row.end_s): row for row in timeline.copies}

    def _note_operation(self, event: OperationEvent) -> None:
        if event.device in self._last:
            self._before[event.operation] = self._last[event.device]
        self._last[event.device] = event
        self._ran_until[event.device, event.end_s] = event
        if event.operation.kind in "BW":
            self._backwards[event.operation.stage, event.device].append(event)

    def _note_transfer(self, event: TransferEvent) -> None:
        self._arrivals[event.consumer] = event
        for resource in event.occupied:
            self._ends_on[resource, event.end_s].append(event)
        for device in {event.source, event.target}:
            self._messages_until[device, event.end_s].append(event)

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

    def last_event(self) -> OptimizerEvent | SynchronisationEvent:
        """Return the optimizer step or the all-gather that ends the iteration."""
        ends = self._timeline.end_s
        last = self.optimizer_event(max(ends, key=lambda name: ends[name]))
        found: list[OptimizerEvent | SynchronisationEvent] = [last, *self._timeline.gathers]
        return max(found, key=lambda event: event.end_s)

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
            case CopyEvent():
                found = self._before_copy(event)
            case SynchronisationEvent(is_gather=True):
                found = self._before_gather(event)
            case SynchronisationEvent():
                found = self._before_reduction(event)
            case OptimizerEvent():
                found = self._before_optimizer(event.device)
        return (cause for cause in found if cause.end_s == event.start_s)

    def _before_operation(self, event: OperationEvent) -> Iterator[Event]:
        yield from self._before_own(event)
        for partner in self._partners.get(event.operation, ()):
            if partner.device != event.device:
                yield from self._before_own(partner)

    def _before_own(self, event: OperationEvent) -> Iterator[Event]:
        if event.operation in self._before:
            yield self._before[event.operation]
        arrival = self._arrivals.get(_as_sent(event.operation))
        if arrival is not None:
            yield arrival
        if event.operation.kind == "B" and event.operation in self._copies:
            yield self._copies[event.operation]
        yield from self._blocking_messages(event.start_s, event.device)

    def _before_copy(self, event: CopyEvent) -> Iterator[Event]:
        """Yield the copy before on the link, and what made it be asked for.

        That is the end of the forward or, of a copy back, what the operation had waited for with
        whose start it was.
        """
        if (event.device, event.start_s) in self._copied_until:
            yield self._copied_until[event.device, event.start_s]
        if event.is_out:
            yield self._runs[event.operation]
        else:
            yield from self._before_operation(self._before[event.operation])

    def _blocking_messages(self, end_s: float, *devices: str) -> list[TransferEvent]:
        """Return messages of some devices that ended at a time, if devices wait for any."""
        if not self._blocks:
            return []
        found = {event for device in devices for event in self._messages_until[device, end_s]}
        return sorted(found, key=lambda event: (event.start_s, event.consumer))

    def _before_transfer(self, event: TransferEvent) -> Iterator[Event]:
        whole = self._runs.get(event.operation)
        # A gradient is named after the whole backward, also where the input gradient sends it.
        yield whole or self._runs[event.operation._replace(kind="I")]
        for resource in event.occupied:
            rivals = self._ends_on[resource, event.start_s]
            yield from sorted(rivals, key=lambda rival: rival.start_s)
        ends = (event.source, event.target) if self._blocks else ()
        for device in ends:
            if (device, event.start_s) in self._ran_until:
                yield self._ran_until[device, event.start_s]
        yield from self._blocking_messages(event.start_s, *ends)

    def _before_reduction(self, event: SynchronisationEvent) -> Iterator[Event]:
        members, pipeline = event.synchronisation, self._timeline.pipeline
        match pipeline.behaviour.reduction:
            case "flush":
                yield from self._before_end(pipeline.devices)
            case "device":
                yield from self._before_end(members.devices)
            case _:
                yield from self._last_backwards(event)
        for other in self._timeline.synchronisations:
            if not set(members.devices).isdisjoint(other.synchronisation.devices):
                yield other

    def _last_backwards(self, event: SynchronisationEvent) -> Iterator[Event]:
        """Yield the last backwards, each until it had made the gradients."""
        for stage in event.synchronisation.stages:
            for device in event.synchronisation.devices:
                for backward in self._backwards[stage, device][-1:]:
                    made_s = self._timeline.made_s[event.number, stage, device]
                    yield replace(backward, end_s=made_s)

    def _before_end(self, devices: Iterable[str]) -> Iterator[Event]:
        """Yield the last that each device runs, and its last sends where it waits for them."""
        for device in devices:
            if device in self._last:
                yield self._last[device]
            yield from self._last_sends[device]

    @cached_property
    def _last_sends(self) -> Mapping[str, Sequence[TransferEvent]]:
        sent: defaultdict[str, list[TransferEvent]] = defaultdict(list)
        for event in self._timeline.transfers if self._sends_block else ():
            if event.end_s > event.start_s:
                sent[event.source].append(event)
        for device, events in sent.items():
            last_s = max(event.end_s for event in events)
            last = (event for event in events if event.end_s == last_s)
            sent[device] = sorted(last, key=lambda event: (event.start_s, event.consumer))
        return sent

    def _before_gather(self, event: SynchronisationEvent) -> Iterator[Event]:
        devices = event.synchronisation.devices
        yield from map(self.optimizer_event, devices)
        for other in self._timeline.gathers:
            if not set(devices).isdisjoint(other.synchronisation.devices):
                yield other

    def _before_optimizer(self, device: str) -> Iterator[Event]:
        yield from self._before_end((device,))
        for event in self._timeline.synchronisations:
            if device in event.synchronisation.devices:
                yield event


def _partners_of(timeline: Timeline) -> Mapping[Operation, Sequence[OperationEvent]]:
    """Return the events that start together, in the order of the stage's devices, for each of them.

    Operations that start by themselves are left out.
    """
    devices = _devices_by_stage(timeline.pipeline)
    counts: Counter[tuple[int, str, str]] = Counter()
    rows: defaultdict[tuple[int, str, int], list[OperationEvent]] = defaultdict(list)
    for event in timeline.operations if devices else ():
        stage, kind, _ = event.operation
        if stage in devices:
            key = stage, kind, event.device
            rows[stage, kind, counts[key]].append(event)
            counts[key] += 1
    for (stage, _, _), events in rows.items():
        events.sort(key=lambda event: devices[stage].index(event.device))
    return {event.operation: events for events in rows.values() for event in events}


def _devices_by_stage(pipeline: PlacedPipeline) -> dict[int, tuple[str, ...]]:
    """Return the devices of each stage whose replicas put layers together."""
    return {
        index: stage.spec.devices
        for index, stage in enumerate(pipeline.stages)
        if stage.collective_s and len(stage.spec.devices) > 1
    }
