"""What each device holds at every moment of claimed times, by docs/memory.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from planner.plan.operations import Operation
from planner.verification.lowering import PlanTasks
from planner.verification.speeds import Span, Times
from planner.verification.tasks import Key

HeldBytes = dict[str, list[tuple[float, int]]]
"""By device, moments and the bytes that it holds from each on."""
_Change = tuple[str, float, int]
"""A device, a moment and the bytes that it holds more from then on."""


def held_bytes(tasks: PlanTasks, times: Times) -> HeldBytes:
    """Return moments and the bytes held from each on, by device.

    All that changes at one moment counts together: what is freed then is free for what starts then.
    """
    changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for device, at_s, more in _changes(tasks, times):
        changes[device].append((at_s, more))
    found: HeldBytes = {}
    for device in tasks.costs.devices:
        held, found[device] = tasks.costs.constant_bytes(device), []
        for at_s, rows in groupby(sorted([(0.0, 0), *changes[device]]), key=itemgetter(0)):
            held += sum(more for _, more in rows)
            found[device].append((at_s, held))
    return found


def peak_bytes(steps: Sequence[tuple[float, int]]) -> int:
    """Return the most that a device holds at any moment."""
    return max(held for _, held in steps)


def _changes(tasks: PlanTasks, times: Times) -> Iterator[_Change]:
    for device, order in tasks.orders.items():
        for operation in order:
            span = times[Key("operation", operation)]
            yield from _of_operation(tasks, device, operation, span)
            if operation in tasks.on_device:
                there = Span(span.end_s, span.end_s)
                yield from _of_message(tasks, tasks.on_device[operation], there)
    for key, span in times.items():
        if not isinstance(key.of, Operation):
            continue
        if key.what == "message":
            yield from _of_message(tasks, key.of, span)
        elif key.what == "copy":
            away = tasks.costs.bytes[key.of.stage].offloaded
            is_out = key.of.kind == "F"
            change = (span.end_s, -away) if is_out else (span.start_s, away)
            yield tasks.tasks[key].devices[0], *change


def _of_message(tasks: PlanTasks, message: Operation, span: Span) -> Iterator[_Change]:
    """The target holds it from its start on, the source until its end."""
    source, target = tasks.ends(message)
    there = tasks.costs.bytes[message.stage]
    if message.kind == "F":
        sent, received = tasks.costs.bytes[message.stage - 1].sent, there.received
    else:
        behind = tasks.costs.bytes[message.stage + 1]
        sent, received = behind.gradient_sent, there.gradient_received
    yield target, span.start_s, received
    yield source, span.end_s, -sent


def _of_operation(
    tasks: PlanTasks, device: str, operation: Operation, span: Span
) -> Iterator[_Change]:
    """What an operation takes and leaves; what it receives was counted as it arrived."""
    row, at_start, at_end = tasks.costs.bytes[operation.stage], 0, 0
    match operation.kind:
        case "F":
            at_start = row.stash - row.received + row.sent
        case "B":
            at_start, at_end = row.gradient_sent, -row.stash - row.gradient_received
        case "I":
            apart = tasks.costs.split_bytes(operation.stage, device)
            at_start = row.gradient_sent + apart
            at_end = row.weight_stash - row.stash - row.gradient_received - apart
        case "W":
            at_end = -row.weight_stash
    yield device, span.start_s, at_start
    yield device, span.end_s, at_end
