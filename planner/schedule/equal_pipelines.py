"""A schedule in each of several equal pipelines, as data parallelism beside pipelining runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.artifacts.operations import Operation
from planner.costs.placement import PlacedPipeline, place
from planner.errors import PipeplanError
from planner.schedule.assignment import balanced_assignment
from planner.schedule.classics import Generator
from planner.simulator import Orders


def orders_of_pipelines(
    pipeline: PlacedPipeline, lanes: Sequence[Sequence[str]], generator: Generator
) -> Orders:
    """The orders of a schedule that every pipeline runs on a share of the microbatches.

    Microbatch m belongs to pipeline m mod R of R; its share is numbered anew within it.

    Args:
        pipeline: all stages with their replicas.
        lanes: of each pipeline the device of each stage.
        generator: of the schedule of one pipeline.

    Raises:
        DoesNotApplyError: if the schedule is not defined for such stages.
        PipeplanError: if the microbatches cannot be shared out equally.
    """
    return _merged(lanes, lambda lane: _orders(pipeline, lane, len(lanes), generator))


def spread_over(lanes: Sequence[Sequence[str]], rows: Sequence[Sequence[Operation]]) -> Orders:
    """The orders of a table that every pipeline runs on its share of the microbatches.

    Args:
        lanes: of each pipeline the device of each stage.
        rows: of one pipeline, the operations of each rank.
    """

    def orders(lane: Sequence[str]) -> Orders:
        return {lane[row[0].stage]: row for row in rows if row}

    return _merged(lanes, orders)


def share_of(microbatches: int, pipelines: int) -> int:
    """How many microbatches each pipeline runs.

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


def _merged(
    lanes: Sequence[Sequence[str]], orders_of: Callable[[Sequence[str]], Orders]
) -> dict[str, tuple[Operation, ...]]:
    merged: dict[str, tuple[Operation, ...]] = {}
    for number, lane in enumerate(lanes):
        for device, order in orders_of(lane).items():
            merged[device] = tuple(_renumbered(order, number, len(lanes)))
    return merged


def _renumbered(order: Sequence[Operation], lane: int, lanes: int) -> Iterator[Operation]:
    for operation in order:
        yield operation._replace(microbatch=lane + lanes * operation.microbatch)


def _orders(
    pipeline: PlacedPipeline, lane: Sequence[str], lanes: int, generator: Generator
) -> Orders:
    """Of one pipeline by itself, its microbatches numbered from 0."""
    problem = pipeline.problem
    job = problem.job.model_copy(update={"microbatches": share_of(pipeline.microbatches, lanes)})
    specs = [
        replace(stage.spec, devices=(device,))
        for stage, device in zip(pipeline.stages, lane, strict=True)
    ]
    alone = place(replace(problem, job=job), specs)
    return generator(alone, balanced_assignment(alone))
