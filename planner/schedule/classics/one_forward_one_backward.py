"""1F1B and its eager form, for one stage a device, with or without replicas."""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment, microbatches_by_replica
from planner.schedule.classics.placements import require_one_stage_a_device
from planner.simulator import Orders


def one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """1F1B: stage s of N warms up with N-s forwards, then alternates.

    Narayanan et al. 2019, "PipeDream", section 3.2, in its synchronous form (DAPPLE, Fan et al.
    2021). With replicas the warm-up counts a stage's replicas together: replica i runs its share.

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    return _alternating(pipeline, owner, in_flight=1)


def eager_one_forward_one_backward(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Eager 1F1B: stage s of N warms up with 2(N-s)-1 forwards, so that transfers are hidden.

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
    """This replica's forwards among those the stage must run before its first backward.

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
