"""Each microbatch by itself: no pipelining, and the least memory."""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment
from planner.simulator import Orders


def one_by_one(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Each microbatch all the way forward and back before the next.

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
