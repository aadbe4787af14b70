"""Published schedules with whole backwards: GPipe, breadth first, and the forms of 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Kind, Operation, Orders, in_turn
from planner.schedules.assignment import Assignment, microbatches_by_replica
from planner.schedules.placements import DoesNotApplyError, loop_of, require_one_stage_a_device


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
    if not pipeline.shares_devices:
        raise DoesNotApplyError("every device holds one stage")
    return _stage_by_stage(pipeline, owner)


def _stage_by_stage(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    held = microbatches_by_replica(owner)

    def runs(device: str, stages: Sequence[int], backward: bool) -> list[Operation]:
        kind: Kind = "B" if backward else "F"
        return [Operation(s, kind, m) for s in stages for m in held.get((s, device), ())]

    return {
        device: runs(device, stages, False) + runs(device, stages[::-1], True)
        for device, stages in pipeline.stages_on.items()
    }


def one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return 1F1B: stage s of N warms up with N-s forwards, then alternates.

    Narayanan et al. 2019, "PipeDream", section 3.2, in its synchronous form (DAPPLE, Fan et al.
    2021). With replicas the warm-up counts a stage's replicas together: each runs its share.

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    return _alternating(pipeline, owner, each=1)


def eager_one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Return eager 1F1B: stage s of N warms up with 2(N-s)-1 forwards to hide transfers.

    Zhuang et al. 2023, "On optimizing the communication of model parallelism", section 4.

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    return _alternating(pipeline, owner, each=2)


def _alternating(pipeline: PlacedPipeline, owner: Assignment, each: int) -> Orders:
    """Alternate after a warm-up of as many microbatches as the later stages hold.

    Args:
        pipeline: the stages.
        owner: the replica of each (stage, microbatch).
        each: microbatches that every device of a later stage holds.
    """
    require_one_stage_a_device(pipeline)
    held = microbatches_by_replica(owner)
    replicas = [len(stage.spec.devices) for stage in pipeline.stages]
    orders: dict[str, list[Operation]] = {}
    for device, (stage,) in pipeline.stages_on.items():
        mine = held.get((stage, device), ())
        first = replicas[stage] + each * sum(replicas[stage + 1 :])
        warm_up = max(1, sum(microbatch < first for microbatch in mine))
        orders[device] = in_turn([stage], [mine], min(warm_up, len(mine)) - 1) if mine else []
    return orders


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
    size, chunks = len(devices), len(pipeline.stages) // len(devices)
    rounds = _rounds(pipeline.microbatches, size)
    return {
        device: in_turn(
            range(number, len(pipeline.stages), size),
            rounds,
            (chunks - 1) * len(rounds[0]) + 2 * (size - 1 - number),
        )
        for number, device in enumerate(devices)
    }


def _rounds(microbatches: int, devices: int) -> list[range]:
    count = max(1, microbatches // devices)
    each, more = divmod(microbatches, count)
    ends = [number * each + min(number, more) for number in range(count + 1)]
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
