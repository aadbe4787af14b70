"""Random orders of a plan's operations, some of whose backwards are split."""

from __future__ import annotations

import random
from collections.abc import Mapping

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation, Orders
from planner.schedules.pipelines import pipelines_of

Owners = Mapping[tuple[int, int], str]
"""The device of each stage and microbatch."""


def random_orders(pipeline: PlacedPipeline, rng: random.Random) -> Orders:
    """Return one random sequence of all operations that respects what each needs, by device.

    Replicas that divide their weights run the same operations, as equal pipelines.
    """
    is_divided = pipeline.problem.job.shards_parameters
    groups = pipelines_of(pipeline) if is_divided else None
    if groups is None:
        return _of_all(pipeline, rng)
    return groups.spread(_of_all(groups.first, rng))


def _of_all(pipeline: PlacedPipeline, rng: random.Random) -> dict[str, list[Operation]]:
    owners = _owners(pipeline, rng)
    share = rng.choice((0.0, 0.5, 1.0)) if pipeline.problem.job.splits else 0.0
    split = {key for key in owners if rng.random() < share}
    orders: dict[str, list[Operation]] = {device: [] for device in pipeline.devices}
    ready = [Operation(0, "F", microbatch) for microbatch in range(pipeline.microbatches)]
    while ready:
        operation = ready.pop(rng.randrange(len(ready)))
        orders[owners[operation.stage, operation.microbatch]].append(operation)
        ready += _enabled(operation, len(pipeline.stages) - 1, split)
    return orders


def _owners(pipeline: PlacedPipeline, rng: random.Random) -> Owners:
    return {
        (index, microbatch): rng.choice(stage.spec.devices)
        for index, stage in enumerate(pipeline.stages)
        for microbatch in range(pipeline.microbatches)
    }


def _enabled(operation: Operation, last: int, split: set[tuple[int, int]]) -> list[Operation]:
    """Return the operations that can run once an operation has run."""
    stage, kind, microbatch = operation

    def backward(of: int) -> Operation:
        return Operation(of, "I" if (of, microbatch) in split else "B", microbatch)

    if kind == "F":
        return [Operation(stage + 1, "F", microbatch) if stage < last else backward(stage)]
    if kind == "W":
        return []
    second = [Operation(stage, "W", microbatch)] if kind == "I" else []
    return [*second, *([backward(stage - 1)] if stage else [])]
