"""Equal pipelines, data parallelism with pipelining: groups of one replica of every stage.

Microbatch m belongs to pipeline m mod R of R; its share is numbered from 0 within it. The slowest
pipeline is scheduled, and all do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import PipeplanError
from planner.plan.membership import unequal
from planner.plan.operations import Operation, Orders
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import Generator
from planner.search.schedule.pipeline_groups import PipelineGroups, spread_orders

Pipelines = Sequence[Sequence[str]]
"""The device of each stage, by pipeline."""


def orders_of_pipelines(
    pipeline: PlacedPipeline, pipelines: Pipelines, generator: Generator
) -> Orders:
    """Return the orders of a schedule that every pipeline runs on a share of the microbatches.

    Args:
        pipeline: all stages with their replicas.
        pipelines: that these form.
        generator: of the schedule of one pipeline.

    Raises:
        DoesNotApplyError: if the schedule is not defined for such stages.
        PipeplanError: if the microbatches cannot be shared out equally.
    """
    share_of(pipeline.microbatches, len(pipelines))
    groups = _groups(pipeline, pipelines)
    slowest = groups.first_of(pipeline)
    return groups.spread(generator(slowest, balanced_assignment(slowest)))


def spread_over(pipelines: Pipelines, rows: Sequence[Sequence[Operation]]) -> Orders:
    """Return the orders of a table that every pipeline runs on its share of the microbatches.

    Args:
        pipelines: that run them.
        rows: of one pipeline, the operations of each rank.
    """
    first = pipelines[0]
    orders = {first[row[0].stage]: row for row in rows if row}
    return spread_orders(orders, [dict(zip(first, other, strict=True)) for other in pipelines])


def pipelines_of(pipeline: PlacedPipeline) -> PipelineGroups | None:
    """Return the pipelines that equal replicas form, with the slowest one planned.

    The i-th devices of all stages where no device is in two pipelines then, else the i-th in the
    cluster's order.

    Returns:
        None if the replicas form no pipelines with equal shares of the microbatches, or only one.
    """
    listed = [stage.spec.devices for stage in pipeline.stages]
    are_equal = unequal([frozenset(devices) for devices in listed]) is None
    if not are_equal or len(listed[0]) < 2 or pipeline.microbatches % len(listed[0]):
        return None
    pipelines = list(zip(*listed, strict=True))
    held = [device for one in pipelines for device in set(one)]
    if len(set(held)) < len(held):
        number = pipeline.problem.cluster.numbers
        ordered = (sorted(devices, key=number.__getitem__) for devices in listed)
        pipelines = list(zip(*ordered, strict=True))
    return _groups(pipeline, pipelines)


def _groups(pipeline: PlacedPipeline, pipelines: Pipelines) -> PipelineGroups:
    slowest = max(pipelines, key=lambda devices: _work_s(pipeline, devices))
    stages = (
        replace(stage.spec, devices=(device,))
        for stage, device in zip(pipeline.stages, slowest, strict=True)
    )
    counterparts = (dict(zip(slowest, devices, strict=True)) for devices in pipelines)
    return PipelineGroups(pipeline.problem, tuple(stages), tuple(counterparts))


def _work_s(pipeline: PlacedPipeline, devices: Sequence[str]) -> float:
    times = (stage.times[device] for stage, device in zip(pipeline.stages, devices, strict=True))
    return sum(time.forward_s + time.backward_s for time in times)


def share_of(microbatches: int, pipelines: int) -> int:
    """Return how many microbatches each pipeline runs.

    Raises:
        PipeplanError: if it is no whole number.
    """
    share, rest = divmod(microbatches, pipelines)
    if rest or not share:
        raise PipeplanError(
            f"job.microbatches: {microbatches} cannot be shared out equally among {pipelines} "
            f"pipelines; set it to a multiple of {pipelines}"
        )
    return share
