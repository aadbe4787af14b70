"""Schedules for stages that go down the devices and up again: ZB-V and DualPipe-V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.artifacts.operations import Kind, Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment
from planner.schedule.classics.placements import DoesNotApplyError, v_of
from planner.simulator import Orders

DOWN, UP, EITHER = 0, 1, 2
_Steps = Iterator[tuple[int, Kind]]


def zb_v(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """ZB-V: no bubble in the memory of 1F1B where all times are equal.

    Qi et al. 2023, "Zero bubble pipeline parallelism", section 6; the paper gives a picture, the
    steps below are our reading of it. Where there are fewer than 2D-1 microbatches, those that do
    not exist are left out.

    Raises:
        DoesNotApplyError: if the stages do not go down the devices and up again.
    """
    del owner
    devices = v_of(pipeline)
    count = max(pipeline.microbatches, 2 * len(devices) - 1)
    return {
        device: _numbered(pipeline, number, _zb_v_steps(number, len(devices), count))
        for number, device in enumerate(devices)
    }


def dual_pipe_v(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """DualPipe-V: the two halves run against each other; backwards whole in the middle.

    DeepSeek-AI 2024, "DualPipe", in the V form of Qi 2025, "DualPipe could be better without the
    dual". A forward and a backward that it overlaps follow each other here: a device runs one
    operation at a time.

    Raises:
        DoesNotApplyError: if the stages do not go down the devices and up again, or there are fewer
            than 2D microbatches.
    """
    del owner
    devices = v_of(pipeline)
    if pipeline.microbatches < 2 * len(devices):
        raise DoesNotApplyError(f"fewer than {2 * len(devices)} microbatches")
    return {
        device: _numbered(
            pipeline, number, _dual_pipe_v_steps(number, len(devices), pipeline.microbatches)
        )
        for number, device in enumerate(devices)
    }


def _numbered(pipeline: PlacedPipeline, number: int, steps: _Steps) -> list[Operation]:
    """The steps of a device with their microbatches, each kind of each half in order."""
    stage_of = {DOWN: number, UP: len(pipeline.stages) - 1 - number}
    half_of = {stage: half for half, stage in stage_of.items()}
    forwards, backwards = Counter[int](), Counter[int]()
    waiting: list[Operation] = []
    order: list[Operation] = []
    for half, kind in steps:
        if kind == "W":
            due = [w for w in waiting if half in (EITHER, half_of[w.stage])][:1]
            order += due
            waiting = [w for w in waiting if w not in due]
            continue
        counter = forwards if kind == "F" else backwards
        order.append(Operation(stage_of[half], kind, counter[half]))
        if kind == "I":
            waiting.append(Operation(stage_of[half], "W", counter[half]))
        counter[half] += 1
    return [operation for operation in order if operation.microbatch < pipeline.microbatches]


def _zb_v_steps(number: int, devices: int, count: int) -> _Steps:
    below = devices - number
    yield from _repeat(2 * below - 1, (DOWN, "F"))
    yield from _repeat(number, (UP, "F"), (DOWN, "F"))
    yield from _repeat(below, (UP, "F"), (UP, "I"), (UP, "W"))
    more = count - 2 * below + 1 - number  # Forwards of the lower half that are left.
    for step in range(count - devices):
        if step < more:
            yield DOWN, "F"
        yield from _repeat(1, (DOWN, "I"), (DOWN, "W"), (UP, "F"), (UP, "I"), (UP, "W"))
    yield from _repeat(number, (DOWN, "I"), (UP, "I"))
    yield from _repeat(below, (DOWN, "I"), (DOWN, "W"))
    yield from _repeat(number, (UP, "W"))
    yield from _repeat(number, (DOWN, "W"))


def _dual_pipe_v_steps(number: int, devices: int, count: int) -> _Steps:
    below = devices - 1 - number
    yield from _repeat(2 * below, (DOWN, "F"))
    yield from _repeat(number + 1, (DOWN, "F"), (UP, "F"))
    yield from _repeat(below, (UP, "I"), (EITHER, "W"), (UP, "F"))
    yield from _repeat(
        count - 2 * devices + number + 1, (DOWN, "F"), (UP, "B"), (UP, "F"), (DOWN, "B")
    )
    yield from _repeat(below, (UP, "B"), (UP, "F"), (DOWN, "B"))
    # Split from the middle of these 2 (number + 1) backwards on.
    whole, from_down = divmod(number + 1, 2)
    yield from _repeat(whole, (UP, "B"), (DOWN, "B"))
    yield from _repeat(from_down, (UP, "B"), (DOWN, "I"))
    yield from _repeat(whole, (UP, "I"), (DOWN, "I"))
    yield from _repeat(below, (EITHER, "W"), (DOWN, "I"))
    yield from _repeat(number + 1, (EITHER, "W"))


def _repeat(times: int, *steps: tuple[int, Kind]) -> _Steps:
    for _ in range(times):
        yield from steps
