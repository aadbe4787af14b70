"""Published schedules with whole backwards: GPipe, breadth first, 1F1B in its forms, one by one."""

from __future__ import annotations

from itertools import pairwise

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders, in_turn
from planner.search.schedule.assignment import Assignment, microbatches_by_replica
from planner.search.schedule.classics.placements import (
    DoesNotApplyError,
    loop_of,
    require_one_stage_a_device,
)


def gpipe(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c).

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    require_one_stage_a_device(pipeline)
    return _stage_by_stage(pipeline, owner)


def looped_breadth_first(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Run a device's stages in turn, each for all microbatches.

    Lamy-Poirier 2023, "Breadth-first pipeline parallelism", section 4.

    Raises:
        DoesNotApplyError: if every device holds one stage: that is GPipe.
    """
    if all(len(stages) == 1 for stages in pipeline.stages_on.values()):
        raise DoesNotApplyError("every device holds one stage")
    return _stage_by_stage(pipeline, owner)


def _stage_by_stage(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    orders: dict[str, list[Operation]] = {}
    held = microbatches_by_replica(owner)
    for device, stages in pipeline.stages_on.items():
        forward = [Operation(s, "F", m) for s in stages for m in held.get((s, device), ())]
        backward = [
            Operation(s, "B", m) for s in reversed(stages) for m in held.get((s, device), ())
        ]
        orders[device] = forward + backward
    return orders


def one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return 1F1B: stage s of N warms up with N-s forwards, then alternates.

    Narayanan et al. 2019, "PipeDream", section 3.2, in its synchronous form (DAPPLE, Fan et al.
    2021). With replicas the warm-up counts a stage's replicas together: replica i runs its share.

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    return _alternating(pipeline, owner, in_flight=1)


def eager_one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return eager 1F1B: stage s of N warms up with 2(N-s)-1 forwards to hide transfers.

    Zhuang et al. 2023, "On optimizing the communication of model parallelism", section 4.

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    return _alternating(pipeline, owner, in_flight=2)


def _alternating(pipeline: PlacedPipeline, owner: Assignment, in_flight: int) -> Orders:
    require_one_stage_a_device(pipeline)
    orders: dict[str, list[Operation]] = {}
    held = microbatches_by_replica(owner)
    for device, (stage,) in pipeline.stages_on.items():
        mine = held.get((stage, device), ())
        orders[device] = _alternate(stage, mine, _warm_up(pipeline, mine, stage, in_flight))
    return orders


def _warm_up(pipeline: PlacedPipeline, mine: tuple[int, ...], stage: int, in_flight: int) -> int:
    """Return this replica's forwards of those before the stage's first backward.

    The microbatches in flight below stage s are at least one per later stage; with replicas each
    later replica holds one, so that the whole of it is kept busy.
    """
    own = len(pipeline.stages[stage].spec.devices)
    later = sum(len(row.spec.devices) for row in pipeline.stages[stage + 1 :])
    return max(1, sum(1 for microbatch in mine if microbatch < own + in_flight * later))


def _alternate(stage: int, mine: tuple[int, ...], warm_up: int) -> list[Operation]:
    warm_up = min(warm_up, len(mine))
    order = [Operation(stage, "F", m) for m in mine[:warm_up]]
    for done, microbatch in enumerate(mine):
        order.append(Operation(stage, "B", microbatch))
        if warm_up + done < len(mine):
            order.append(Operation(stage, "F", mine[warm_up + done]))
    return order


def interleaved_one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Run a device's chunks in rounds of about D microbatches, then 1F1B over all chunks.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters",
    section 2.2, for numbers of microbatches that are multiples of the D devices. Others are cut
    into rounds that differ by one at most.

    Raises:
        DoesNotApplyError: if the stages do not loop around the devices, or a stage has replicas.
    """
    del owner  # Without replicas there is no choice.
    devices = loop_of(pipeline)
    chunks = len(pipeline.stages) // len(devices)
    rounds = _rounds(pipeline.microbatches, len(devices))
    orders: dict[str, list[Operation]] = {}
    for number, device in enumerate(devices):
        stages = range(number, len(pipeline.stages), len(devices))
        ahead = (chunks - 1) * len(rounds[0]) + 2 * (len(devices) - 1 - number)
        orders[device] = in_turn(stages, rounds, ahead)
    return orders


def _rounds(microbatches: int, devices: int) -> list[range]:
    count = max(1, microbatches // devices)
    each, more = divmod(microbatches, count)
    ends = [0]
    for number in range(count):
        ends.append(ends[-1] + each + (number < more))
    return [range(first, end) for first, end in pairwise(ends)]


def one_by_one(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Run each microbatch all the way forward and back before the next.

    With one stage a device and no replicas, every device holds no more at any moment than its
    largest operation needs by itself: if this schedule does not fit, none does.
    """
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    stages = range(len(pipeline.stages))
    for microbatch in range(pipeline.microbatches):
        for stage in stages:
            orders[owner[stage, microbatch]].append(Operation(stage, "F", microbatch))
        for stage in reversed(stages):
            orders[owner[stage, microbatch]].append(Operation(stage, "B", microbatch))
    return orders
