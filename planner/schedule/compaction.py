"""Start as late as the ends allow: the spans of the stages without the waits at their beginning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

from planner.artifacts.operations import Operation
from planner.simulator import OperationEvent, Timeline, TransferEvent

Event = OperationEvent | TransferEvent


def compacted(timeline: Timeline) -> Timeline:
    """The same orders on every device and link, everything as late as possible.

    The last operation of each device ends when it did, and so does the iteration. Where iterations
    overlap, a device runs the end of the one before in the time that this frees.
    """
    events: list[Event] = [*timeline.operations, *timeline.transfers]
    later: dict[int, set[int]] = {number: set() for number in range(len(events))}
    for first, second in _in_turn(timeline, events):
        later[first].add(second)
    last_of = {event.device: number for number, event in enumerate(timeline.operations)}
    fixed = set(last_of.values())
    start: dict[int, float] = {}
    for number in TopologicalSorter(later).static_order():
        event = events[number]
        end_s = min((start[other] for other in later[number]), default=event.end_s)
        if number in fixed:
            end_s = min(end_s, event.end_s)
        start[number] = end_s - (event.end_s - event.start_s)
    moved = [
        replace(event, start_s=start[number], end_s=start[number] + event.end_s - event.start_s)
        for number, event in enumerate(events)
    ]
    operations = [event for event in moved if isinstance(event, OperationEvent)]
    transfers = [event for event in moved if isinstance(event, TransferEvent)]
    return replace(
        timeline,
        operations=tuple(sorted(operations, key=lambda event: event.start_s)),
        transfers=tuple(sorted(transfers, key=lambda event: event.start_s)),
    )


def _in_turn(timeline: Timeline, events: list[Event]) -> Iterator[tuple[int, int]]:
    """Pairs of events of which the second starts after the first has ended, by their numbers."""
    on: defaultdict[object, list[int]] = defaultdict(list)
    number_of: dict[Operation, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, OperationEvent):
            on[event.device].append(number)
            number_of[event.operation] = number
        else:
            # What takes no time holds no link, and has no place in the order of those that do.
            for link in event.links if event.end_s > event.start_s else ():
                on[link].append(number)
    for row in on.values():
        yield from pairwise(row)
    for number, event in enumerate(events):
        if isinstance(event, TransferEvent):
            stage, kind, microbatch = event.operation
            yield _either(number_of, stage, kind, microbatch), number
            step = 1 if kind == "F" else -1
            yield number, _either(number_of, stage + step, kind, microbatch)


def _either(number_of: dict[Operation, int], stage: int, kind: str, microbatch: int) -> int:
    """A forward; or a gradient, whether it is a whole backward or an input gradient."""
    if kind == "F":
        return number_of[Operation(stage, "F", microbatch)]
    whole = number_of.get(Operation(stage, "B", microbatch))
    return whole if whole is not None else number_of[Operation(stage, "I", microbatch)]
