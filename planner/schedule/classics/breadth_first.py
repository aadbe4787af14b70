"""All forwards, then all backwards: GPipe; looped breadth first with several stages a device."""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment, microbatches_by_replica
from planner.schedule.classics.placements import DoesNotApplyError, require_one_stage_a_device
from planner.simulator import Orders


def gpipe(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """All microbatches forward, then all backward (Huang et al. 2019, "GPipe", figure 2c).

    Raises:
        DoesNotApplyError: if a device holds several stages.
    """
    require_one_stage_a_device(pipeline)
    return _stage_by_stage(pipeline, owner)


def looped_breadth_first(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """A device's stages in turn, each for all microbatches.

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
