"""Published schedules with split backwards: ZB-H1, ZB-H2, and in a V ZB-V and DualPipe-V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind, Operation, Orders
from planner.search.schedule.assignment import Assignment
from planner.search.schedule.classics.placements import (
    DoesNotApplyError,
    require_no_replicas,
    require_one_stage_a_device,
    v_of,
)


def zb_h1(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return ZB-H1: 1F1B with delayed weight gradients, in the memory of 1F1B's first stage.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    del owner
    return _handcrafted(pipeline, depth=1)


def zb_h2(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return ZB-H2: twice as many microbatches in flight, no bubble if all times are equal.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    del owner
    return _handcrafted(pipeline, depth=2)


def _handcrafted(pipeline: PlacedPipeline, depth: int) -> Orders:
    require_one_stage_a_device(pipeline)
    require_no_replicas(pipeline)
    last = len(pipeline.stages) - 1
    return {
        stage.spec.devices[0]: _order(
            number, pipeline.microbatches, depth * (last - number), depth * number
        )
        for number, stage in enumerate(pipeline.stages)
    }


def _order(stage: int, count: int, ahead: int, behind: int) -> list[Operation]:
    """Run forwards ``ahead`` of input gradients, and weight gradients ``behind`` them."""
    order: list[Operation] = []
    for step in range(-ahead, count + behind):
        row = (
            Operation(stage, "F", step + ahead),
            Operation(stage, "I", step),
            Operation(stage, "W", step - behind),
        )
        order += [operation for operation in row if 0 <= operation.microbatch < count]
    return order


DOWN, UP, EITHER = 0, 1, 2
_Steps = Iterator[tuple[int, Kind]]


def zb_v(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return ZB-V: no bubble in the memory of 1F1B where all times are equal.

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
    """Return DualPipe-V: both directions run against each other; middle backwards are whole.

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
    """Return the steps of a device with their microbatches, each kind in order."""
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
