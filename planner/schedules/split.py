"""Published schedules with split backwards: ZB-H1, ZB-H2, and in a V ZB-V and DualPipe-V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind, Operation, Orders
from planner.schedules.assignment import Assignment
from planner.schedules.placements import (
    DoesNotApplyError,
    require_no_replicas,
    require_one_stage_a_device,
    v_of,
)


def split_backwards(
    order: Sequence[Operation], stages: Collection[int] | None = None
) -> list[Operation]:
    """Return an order with whole backwards split into an input and a weight gradient each.

    Args:
        order: of a device.
        stages: whose backwards are split; None: of all stages.
    """
    apart: list[Operation] = []
    for operation in order:
        if operation.kind == "B" and (stages is None or operation.stage in stages):
            apart += [operation._replace(kind="I"), operation._replace(kind="W")]
        else:
            apart.append(operation)
    return apart


def join_split_backwards(
    order: Sequence[Operation], is_wanted: Callable[[Operation], bool]
) -> list[Operation]:
    """Join input and weight gradients that follow each other to whole backwards, where wanted.

    Args:
        order: of a device.
        is_wanted: asked for each such input gradient.
    """
    joined: list[Operation] = []
    for operation in order:
        before = operation._replace(kind="I")
        if operation.kind == "W" and joined[-1:] == [before] and is_wanted(before):
            joined[-1] = operation._replace(kind="B")
        else:
            joined.append(operation)
    return joined


# --- one stage a device ---------------------------------------------------------------------------


def zb_h1(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return ZB-H1: 1F1B with delayed weight gradients, in the memory of 1F1B's first stage.

    Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    del owner  # Without replicas there is no choice, here and below.
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
    for turn in range(-ahead, count + behind):
        row = (
            Operation(stage, "F", turn + ahead),
            Operation(stage, "I", turn),
            Operation(stage, "W", turn - behind),
        )
        order += [operation for operation in row if 0 <= operation.microbatch < count]
    return order


# --- in a V ---------------------------------------------------------------------------------------

DOWN, UP, EITHER = 0, 1, 2
_Turns = Iterator[tuple[int, Kind]]


def zb_v(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return ZB-V: no bubble in the memory of 1F1B where all times are equal.

    Qi et al. 2023, "Zero bubble pipeline parallelism", section 6; the paper gives a picture, what
    each device does in turn below is our reading of it. Where there are fewer than 2D-1
    microbatches, those that do not exist are left out.

    Raises:
        DoesNotApplyError: if the stages do not go down the devices and up again.
    """
    del owner
    size = len(v_of(pipeline))
    return _in_a_v(pipeline, max(pipeline.microbatches, 2 * size - 1), _zb_v_turns)


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
    size = len(v_of(pipeline))
    if pipeline.microbatches < 2 * size:
        raise DoesNotApplyError(f"fewer than {2 * size} microbatches")
    return _in_a_v(pipeline, pipeline.microbatches, _dual_pipe_v_turns)


def _in_a_v(
    pipeline: PlacedPipeline, count: int, turns: Callable[[int, int, int], _Turns]
) -> Orders:
    devices = v_of(pipeline)
    return {
        device: _numbered(pipeline, number, turns(number, len(devices), count))
        for number, device in enumerate(devices)
    }


def _numbered(pipeline: PlacedPipeline, number: int, turns: _Turns) -> list[Operation]:
    """Return what a device does in turn with its microbatches, each kind in order."""
    stage_of = {DOWN: number, UP: len(pipeline.stages) - 1 - number}
    forwards, backwards = Counter[int](), Counter[int]()
    waiting: list[tuple[int, Operation]] = []
    order: list[Operation] = []
    for half, kind in turns:
        if kind == "W":
            due = [row for row in waiting if half in (EITHER, row[0])][:1]
            order += [operation for _, operation in due]
            waiting = [row for row in waiting if row not in due]
            continue
        counter = forwards if kind == "F" else backwards
        order.append(Operation(stage_of[half], kind, counter[half]))
        if kind == "I":
            waiting.append((half, order[-1]._replace(kind="W")))
        counter[half] += 1
    return [operation for operation in order if operation.microbatch < pipeline.microbatches]


def _zb_v_turns(number: int, devices: int, count: int) -> _Turns:
    below = devices - number
    yield from _repeat(2 * below - 1, (DOWN, "F"))
    yield from _repeat(number, (UP, "F"), (DOWN, "F"))
    yield from _repeat(below, (UP, "F"), (UP, "I"), (UP, "W"))
    more = count - 2 * below + 1 - number  # Forwards of the lower half that are left.
    for turn in range(count - devices):
        if turn < more:
            yield DOWN, "F"
        yield from _repeat(1, (DOWN, "I"), (DOWN, "W"), (UP, "F"), (UP, "I"), (UP, "W"))
    yield from _repeat(number, (DOWN, "I"), (UP, "I"))
    yield from _repeat(below, (DOWN, "I"), (DOWN, "W"))
    yield from _repeat(number, (UP, "W"))
    yield from _repeat(number, (DOWN, "W"))


def _dual_pipe_v_turns(number: int, devices: int, count: int) -> _Turns:
    below = devices - 1 - number
    yield from _repeat(2 * below, (DOWN, "F"))
    yield from _repeat(number + 1, (DOWN, "F"), (UP, "F"))
    yield from _repeat(below, (UP, "I"), (EITHER, "W"), (UP, "F"))
    middle = count - 2 * devices + number + 1
    yield from _repeat(middle, (DOWN, "F"), (UP, "B"), (UP, "F"), (DOWN, "B"))
    yield from _repeat(below, (UP, "B"), (UP, "F"), (DOWN, "B"))
    # Split from the middle of these 2 (number + 1) backwards on.
    whole, from_down = divmod(number + 1, 2)
    yield from _repeat(whole, (UP, "B"), (DOWN, "B"))
    yield from _repeat(from_down, (UP, "B"), (DOWN, "I"))
    yield from _repeat(whole, (UP, "I"), (DOWN, "I"))
    yield from _repeat(below, (EITHER, "W"), (DOWN, "I"))
    yield from _repeat(number + 1, (EITHER, "W"))


def _repeat(times: int, *turns: tuple[int, Kind]) -> _Turns:
    for _ in range(times):
        yield from turns
