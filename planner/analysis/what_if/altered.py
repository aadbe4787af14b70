"""A plan under a change: the problem it would answer then, its stages and its orders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.costs.placement import StageSpec
from planner.errors import PipeplanError, near
from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import is_expressible
from planner.variants.changes import (
    AnotherDevice,
    Change,
    DeviceChange,
    LinkChange,
    MicrobatchChange,
    RecomputeChange,
    SpaceChange,
)
from planner.variants.microbatches import IN_PROPORTION, with_microbatches
from planner.variants.problems import with_device_added, with_device_figures, with_job, with_link


@dataclass(frozen=True)
class Altered:
    """A plan under a change.

    Attributes:
        problem: as it would be.
        stages: the plan's, with what they recompute.
        orders: the plan's, the same work in the same order.
        is_of_plan: whether the plan was changed and the problem was not, so that there is nothing
            to solve again.
        assumes: what the figures rest on besides the cost model.
    """

    problem: Problem
    stages: tuple[StageSpec, ...]
    orders: Orders
    is_of_plan: bool = False
    assumes: str | None = None


def unaltered(plan: Plan) -> Altered:
    """Return a plan as it is."""
    stages = tuple(StageSpec(s.layers, s.devices, s.recompute) for s in plan.stages)
    return Altered(plan.problem, stages, plan.parsed_orders())


def alter(start: Altered, change: Change) -> Altered:
    """Return a plan under a change.

    Raises:
        PipeplanError: naming the change, and what it names that there is not or cannot be.
    """
    try:
        match change:
            case DeviceChange():
                return replace(start, problem=with_device_figures(start.problem, change))
            case LinkChange():
                return replace(start, problem=with_link(start.problem, change))
            case AnotherDevice():
                return replace(start, problem=with_device_added(start.problem, change.device))
            case RecomputeChange():
                return _with_recompute(start, change)
            case MicrobatchChange():
                return _with_microbatches(start, change.number)
            case SpaceChange():
                return _with_space(start, change)
    except PipeplanError as error:
        raise PipeplanError(f"change '{change}': {problem}" for problem in error.problems) from None


def alter_each(start: Altered, changes: Iterable[Change]) -> dict[Change, Altered]:
    """Return a plan under each of some changes.

    Raises:
        PipeplanError: naming every change that cannot be made.
    """
    found: dict[Change, Altered] = {}
    problems: list[str] = []
    for change in dict.fromkeys(changes):
        try:
            found[change] = alter(start, change)
        except PipeplanError as error:
            problems += error.problems
    if problems:
        raise PipeplanError(problems)
    return found


def _with_recompute(start: Altered, change: RecomputeChange) -> Altered:
    layer = change.layer
    if layer not in start.problem.graph.layers:
        raise PipeplanError(
            f"the model has no such layer; {near(layer, start.problem.graph.layers)}"
        )
    if change.recompute and not start.problem.job.recompute:
        raise PipeplanError("the job forbids recomputation; set recompute = true in it")
    stages = tuple(
        _with_layer(stage, layer, change.recompute) if layer in stage.layers else stage
        for stage in start.stages
    )
    if stages == start.stages:
        raise PipeplanError(
            "the plan recomputes it already"
            if change.recompute
            else "the plan does not recompute it"
        )
    return replace(start, stages=stages, is_of_plan=True)


def _with_layer(stage: StageSpec, layer: str, recompute: bool) -> StageSpec:
    again = {*stage.recompute, layer} if recompute else {*stage.recompute} - {layer}
    return replace(stage, recompute=tuple(name for name in stage.layers if name in again))


def _with_microbatches(start: Altered, number: int) -> Altered:
    return replace(
        start,
        problem=with_microbatches(start.problem, number),
        orders={device: _divided(order, number) for device, order in start.orders.items()},
        assumes=IN_PROPORTION,
    )


def _with_space(start: Altered, change: SpaceChange) -> Altered:
    job = start.problem.job
    if job.model_copy(update=change.job_fields) == job:
        ((field, value),) = change.job_fields.items()
        raise PipeplanError(f"job.{field} is {json.dumps(value)} already")
    problem = with_job(start.problem, **change.job_fields)
    if not is_expressible(problem):
        raise PipeplanError(f"{job.runtime}, for which it was planned, cannot run such plans")
    return replace(start, problem=problem)


def _divided(order: Sequence[Operation], number: int) -> tuple[Operation, ...]:
    """Replace each operation by ``number`` operations that follow each other."""
    return tuple(
        operation._replace(microbatch=number * operation.microbatch + part)
        for operation in order
        for part in range(number)
    )
