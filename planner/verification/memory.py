"""What each device holds at every moment of claimed times, by docs/memory.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from planner.plan.operations import Operation
from planner.units import format_bytes
from planner.verification.speeds import Span, Times
from planner.verification.tasks import PlanTasks


class Held(NamedTuple):
    """What a device holds.

    Attributes:
        peak: the most bytes at any moment.
        over: the first moment and the bytes that it holds then beyond its capacity; None: never.
    """

    peak: int
    over: tuple[float, int] | None


def held_bytes(tasks: PlanTasks, times: Times) -> dict[str, Held]:
    """Return what each device holds.

    All that changes at one moment counts together: what is freed then is free for what starts then.
    """
    changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for device, at_s, more in _changes(tasks, times):
        changes[device].append((at_s, more))
    found: dict[str, Held] = {}
    for device in tasks.costs.devices:
        capacity, held = tasks.costs.capacity_bytes(device), tasks.costs.constant_bytes(device)
        steps = []
        for at_s, rows in groupby(sorted([(0.0, 0), *changes[device]]), key=itemgetter(0)):
            held += sum(more for _, more in rows)
            steps.append((at_s, held))
        over = next((step for step in steps if step[1] > capacity), None)
        found[device] = Held(max(held for _, held in steps), over)
    return found


def memory_problems(tasks: PlanTasks, held: dict[str, Held]) -> Iterator[str]:
    """Yield the devices that hold more than they have."""
    for device, (peak, over) in held.items():
        if over is not None:
            kind = tasks.plan.cluster.device_type(device)
            capacity = format_bytes(tasks.costs.capacity_bytes(device))
            yield (
                f"memory of {device!r}: {format_bytes(over[1])} at {over[0]:.6f} s (peak "
                f"{format_bytes(peak)}), but it has {capacity} (memory_gib {kind.memory_gib:g} "
                f"less reserved_gib {kind.reserved_gib:g}); give it fewer layers or fewer "
                "microbatches in flight"
            )


def _changes(tasks: PlanTasks, times: Times) -> Iterator[tuple[str, float, int]]:
    """Yield a device, a moment and the bytes that it holds more from then on."""
    for key, span in times.items():
        if not isinstance(key.of, Operation):
            continue
        device, stage = tasks.tasks[key].devices[0], key.of.stage
        match key.what:
            case "operation":
                yield from _of_operation(tasks, device, key.of, span)
                if key.of in tasks.kept:
                    there = Span(span.end_s, span.end_s)
                    yield from _of_message(tasks, tasks.kept[key.of], there)
            case "message":
                yield from _of_message(tasks, key.of, span)
            case "copy":
                away = tasks.costs.bytes[stage].offloaded
                is_out = key.of.kind == "F"
                yield (device, span.end_s, -away) if is_out else (device, span.start_s, away)


def _of_message(
    tasks: PlanTasks, message: Operation, span: Span
) -> Iterator[tuple[str, float, int]]:
    """The target holds it from its start on, the source until its end."""
    source, target = tasks.ends(message)
    rows, stage = tasks.costs.bytes, message.stage
    if message.kind == "F":
        sent, received = rows[stage - 1].sent, rows[stage].received
    else:
        sent, received = rows[stage + 1].gradient_sent, rows[stage].gradient_received
    yield target, span.start_s, received
    yield source, span.end_s, -sent


def _of_operation(
    tasks: PlanTasks, device: str, operation: Operation, span: Span
) -> Iterator[tuple[str, float, int]]:
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
