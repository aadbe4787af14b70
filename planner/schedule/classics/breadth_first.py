"""All forwards, then all backwards: GPipe; looped breadth first with several stages a device."""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment, microbatches_by_replica
from planner.simulator import Orders


def breadth_first(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Stage by stage, every microbatch forward, then back the same way.

    With one stage a device this is GPipe (Huang et al. 2019, "GPipe", figure 2c), with several the
    looped breadth-first schedule (Lamy-Poirier 2023, "Breadth-first pipeline parallelism").
    """
    orders: dict[str, list[Operation]] = {}
    held = microbatches_by_replica(owner)
    for device, stages in pipeline.stages_on.items():
        forward = [Operation(s, "F", m) for s in stages for m in held.get((s, device), ())]
        backward = [
            Operation(s, "B", m) for s in reversed(stages) for m in held.get((s, device), ())
        ]
        orders[device] = forward + backward
    return orders
