"""The published schedules every planner is compared with, for stages with or without replicas."""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment, microbatches_by_replica
from planner.simulator import Orders


def gpipe(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", figure 2c)."""
    orders: dict[str, list[Operation]] = {}
    held = microbatches_by_replica(owner)
    for device, stages in pipeline.stages_on.items():
        forward = [Operation(s, "F", m) for s in stages for m in held.get((s, device), ())]
        backward = [
            Operation(s, "B", m) for s in reversed(stages) for m in held.get((s, device), ())
        ]
        orders[device] = forward + backward
    return orders


def one_by_one(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Each microbatch all the way forward and back before the next: no pipelining, least memory.

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


def one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """1F1B: stage s of N warms up with N-s forwards, then alternates.

    Narayanan et al. 2019, "PipeDream", section 3.2, in its synchronous form (DAPPLE, Fan et al.
    2021). With replicas the warm-up counts a stage's replicas together: replica i runs its share.

    Raises:
        ValueError: if a device holds several stages, for which 1F1B is not defined.
    """
    if any(len(stages) > 1 for stages in pipeline.stages_on.values()):
        raise ValueError("1F1B is defined for one stage a device")
    orders: dict[str, list[Operation]] = {}
    held = microbatches_by_replica(owner)
    for device, (stage,) in pipeline.stages_on.items():
        mine = held.get((stage, device), ())
        orders[device] = _alternate(stage, mine, _warm_up(pipeline, mine, stage))
    return orders


def _warm_up(pipeline: PlacedPipeline, mine: tuple[int, ...], stage: int) -> int:
    """This replica's forwards among those the stage must run before its first backward.

    The microbatches in flight below stage s are at least one per later stage; with replicas each
    later replica holds one, so that the whole of it is kept busy.
    """
    in_flight = sum(len(later.spec.devices) for later in pipeline.stages[stage:])
    return max(1, sum(1 for microbatch in mine if microbatch < in_flight))


def _alternate(stage: int, mine: tuple[int, ...], warm_up: int) -> list[Operation]:
    warm_up = min(warm_up, len(mine))
    order = [Operation(stage, "F", m) for m in mine[:warm_up]]
    for done, microbatch in enumerate(mine):
        order.append(Operation(stage, "B", microbatch))
        if warm_up + done < len(mine):
            order.append(Operation(stage, "F", mine[warm_up + done]))
    return order
