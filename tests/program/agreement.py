"""Times of programs beside those of planner.simulation, to the last bit."""

import re
from collections.abc import Iterator, Sequence

import pytest

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Operation, Orders
from planner.program.lower.lower import Lowered, lower_orders
from planner.program.program import COMPUTE, KINDS, STEP
from planner.program.replay import Times, replay
from planner.simulation.simulator import replay_objects
from planner.simulation.timeline import Timeline

Span = tuple[float, float]


def spans_of_timeline(timeline: Timeline) -> Iterator[tuple[object, Span]]:
    for event in timeline.operations:
        yield event.operation, (event.start_s, event.end_s)
    for move in timeline.transfers:
        yield ("to", move.consumer), (move.start_s, move.end_s)
    for copy in timeline.copies:
        yield ("copy", copy.operation), (copy.start_s, copy.end_s)
    for event in timeline.synchronisations:
        yield ("reduce", event.number), (event.start_s, event.end_s)
    for event in timeline.gathers:
        yield ("gather", event.number), (event.start_s, event.end_s)
    for device, end_s in timeline.end_s.items():
        yield ("step", device), end_s


def spans_of_program(lowered: Lowered, times: Times) -> Iterator[tuple[object, Span]]:
    program, placed = lowered.program, lowered.placed
    first, syncs = int(program.numbers["first_late"]), placed.synchronisations
    gathers = [number for number, sync in enumerate(syncs) if sync.gathers]
    steps = first + len(syncs)
    last = steps + len(placed.devices)
    for n, task in enumerate(program.tasks):
        span = float(times.start_s[n]), float(times.end_s[n])
        if n >= last:
            yield ("gather", gathers[n - last]), span
        elif task["role"] == STEP:
            yield ("step", placed.devices[task["resource"]]), span[1]
        elif n >= first:
            yield ("reduce", n - first), span
        elif task["stage"] >= 0:
            what = Operation(int(task["stage"]), KINDS[task["kind"]], int(task["microbatch"]))
            is_copy = n in lowered.copies
            yield what if task["role"] == COMPUTE else ("copy" if is_copy else "to", what), span


def require_agreement(
    placed: PlacedPipeline,
    orders: Orders,
    by_length: Sequence[PlacedPipeline] = (),
    length_of: Sequence[int] = (),
) -> Timeline | None:
    """Replay orders both ways; None if both deadlock."""
    lowered = lower_orders(placed, orders, by_length, length_of)
    try:
        timeline = replay_objects(placed, orders, [by_length[length] for length in length_of])
    except DeadlockError as error:
        with pytest.raises(DeadlockError, match=re.escape(str(error))):
            replay(lowered.program)
        return None
    require_equal(lowered, replay(lowered.program), timeline)
    return timeline


def require_equal(lowered: Lowered, times: Times, timeline: Timeline) -> None:
    placed = lowered.placed
    assert dict(spans_of_program(lowered, times)) == dict(spans_of_timeline(timeline))
    assert dict(zip(placed.devices, times.peak_bytes, strict=True)) == timeline.peak_memory_bytes
    assert times.time_s == timeline.iteration_time_s
