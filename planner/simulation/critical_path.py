"""The critical path: a chain of events without a gap from time 0 to the end of the iteration.

In a replay nothing starts later than it must, so whatever starts after time 0 starts exactly when
something it waited for ended, or had made the gradients to reduce. The replay notes which, and
following that back from the end gives the path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from planner.plan.operations import Operation
from planner.simulation.timeline import (
    CopyEvent,
    Event,
    OperationEvent,
    OptimizerEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)

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
    events = causes.chain(causes.last_event())
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
    """What each event of a timeline waited for, which ended when it started."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._task_of = {id(event): n for n, event in timeline.by_task.items()}

    def chain(self, event: Event, until_s: float = 0.0) -> list[Event]:
        """Return a chain of events without gaps that ends with the given event.

        Each event waited for the one before it; of a backward that still runs when the gradients
        of a reduction are there, the part until then.

        Args:
            event: an event of the timeline, or an optimizer step.
            until_s: the first event of the chain runs at this time, or starts at it.
        """
        found, n = [event], self._task_of[id(event)]
        while found[-1].start_s > until_s:
            n = self._timeline.causes[n]
            before, start_s = self._timeline.by_task[n], found[-1].start_s
            found.append(replace(before, end_s=start_s) if before.end_s > start_s else before)
        return found[::-1]

    def last_event(self) -> OptimizerEvent | SynchronisationEvent:
        """Return the optimizer step or the all-gather that ends the iteration."""
        found: list[OptimizerEvent | SynchronisationEvent]
        found = [*self._timeline.steps, *self._timeline.gathers]
        return max(found, key=lambda event: event.end_s)
