"""One schedule in each of several equal pipelines: data parallelism with pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.costs.placement import PlacedPipeline, place
from planner.errors import PipeplanError
from planner.plan.operations import Operation, Orders
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import Generator
from planner.search.schedule.pipeline_groups import renumbered, spread_orders
from planner.variants.problems import with_job


def orders_of_pipelines(
    pipeline: PlacedPipeline, replicas: Sequence[Sequence[str]], generator: Generator
) -> Orders:
    """Return the orders of a schedule that every pipeline runs on a share of the microbatches.

    Microbatch m belongs to pipeline m mod R of R; its share is numbered from 0 within it.

    Args:
        pipeline: all stages with their replicas.
        replicas: of each pipeline the device of each stage.
        generator: of the schedule of one pipeline.

    Raises:
        DoesNotApplyError: if the schedule is not defined for such stages.
        PipeplanError: if the microbatches cannot be shared out equally.
    """
    count = len(replicas)
    return {
        device: renumbered(order, number, count)
        for number, replica in enumerate(replicas)
        for device, order in _orders(pipeline, replica, count, generator).items()
    }


def spread_over(replicas: Sequence[Sequence[str]], rows: Sequence[Sequence[Operation]]) -> Orders:
    """Return the orders of a table that every pipeline runs on its share of the microbatches.

    Args:
        replicas: of each pipeline the device of each stage.
        rows: of one pipeline, the operations of each rank.
    """
    first = replicas[0]
    orders = {first[row[0].stage]: row for row in rows if row}
    return spread_orders(orders, [dict(zip(first, other, strict=True)) for other in replicas])


def in_all_pipelines(replicas: Sequence[Sequence[str]], orders: Orders) -> Orders:
    """Return the orders of one of several pipelines, run by all of them on their shares.

    Args:
        replicas: of each pipeline the device of each stage.
        orders: of the devices of one of them, its microbatches numbered from 0.
    """
    return spread_over(replicas, list(orders.values()))


def pipelines_of(pipeline: PlacedPipeline) -> list[tuple[str, ...]]:
    """Return the device of each stage in each pipeline that equal replicas form.

    The i-th devices of all stages where no device is in two pipelines then, else the i-th in the
    cluster's order.

    Args:
        pipeline: whose stages have as many replicas, on device sets that are equal or disjoint.
    """
    listed = [stage.spec.devices for stage in pipeline.stages]
    replicas = list(zip(*listed, strict=True))
    held = [device for replica in replicas for device in set(replica)]
    if len(set(held)) == len(held):
        return replicas
    number = pipeline.problem.cluster.numbers
    return list(zip(*(sorted(row, key=number.__getitem__) for row in listed), strict=True))


def slowest_alone(pipeline: PlacedPipeline, replicas: Sequence[Sequence[str]]) -> PlacedPipeline:
    """Return the pipeline with most work for a microbatch alone, with its share of them."""
    slowest = max(replicas, key=lambda replica: _work_s(pipeline, replica))
    return _alone(pipeline, slowest, len(replicas))


def orders_alone(orders: Orders, alone: PlacedPipeline) -> Orders:
    """Return the orders of one pipeline, its microbatches numbered from 0.

    Args:
        orders: of all pipelines.
        alone: the pipeline.
    """
    held = sorted({row.microbatch for device in alone.devices for row in orders[device]})
    number = {microbatch: index for index, microbatch in enumerate(held)}
    return {
        device: [row._replace(microbatch=number[row.microbatch]) for row in orders[device]]
        for device in alone.devices
    }


def _work_s(pipeline: PlacedPipeline, replica: Sequence[str]) -> float:
    times = (stage.times[device] for stage, device in zip(pipeline.stages, replica, strict=True))
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


def _orders(
    pipeline: PlacedPipeline, replica: Sequence[str], count: int, generator: Generator
) -> Orders:
    """Return the orders of one pipeline alone, its microbatches numbered from 0."""
    alone = _alone(pipeline, replica, count)
    return generator(alone, balanced_assignment(alone))


def _alone(pipeline: PlacedPipeline, replica: Sequence[str], count: int) -> PlacedPipeline:
    """Return one of so many pipelines, with its share of the microbatches."""
    share = share_of(pipeline.microbatches, count)
    problem = with_job(pipeline.problem, microbatches=share, replication=False)
    specs = [
        replace(stage.spec, devices=(device,))
        for stage, device in zip(pipeline.stages, replica, strict=True)
    ]
    return place(problem, specs)
