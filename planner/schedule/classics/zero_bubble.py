"""Zero-bubble schedules with one stage a device: ZB-H1 and ZB-H2.

Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.2. The paper gives them as pictures;
the rule below is our reading of these.
"""

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline
from planner.schedule.assignment import Assignment
from planner.schedule.classics.placements import require_no_replicas, require_one_stage_a_device
from planner.simulator import Orders


def zb_h1(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """1F1B with weight gradients put off, later stages longer: the memory of 1F1B's first stage.

    Raises:
        DoesNotApplyError: if a device holds several stages or a stage has replicas.
    """
    del owner
    return _handcrafted(pipeline, depth=1)


def zb_h2(pipeline: PlacedPipeline, owner: Assignment) -> Orders:
    """Twice as many microbatches in flight, which leaves no bubble where all times are equal.

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
    """Forwards run so many ahead of input gradients, weight gradients so many behind them."""
    order: list[Operation] = []
    for step in range(-ahead, count + behind):
        row = (
            Operation(stage, "F", step + ahead),
            Operation(stage, "I", step),
            Operation(stage, "W", step - behind),
        )
        order += [operation for operation in row if 0 <= operation.microbatch < count]
    return order
