"""Divisions of the devices into equal pipelines, and why there may be none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.assembly import assemble_plan
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.costs.stage_table import StageTable
from planner.errors import DeadlockError, InfeasibleError, PipeplanError
from planner.plan.operations import Orders
from planner.plan.plan import Plan, Provenance
from planner.plan.problem import Problem
from planner.schedules.pipelines import spread_orders
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS
from planner.units import plural
from planner.variants.problems import restricted_to, with_job
from planner.verification import verify

Grouping = tuple[tuple[str, ...], ...]
"""The devices of each pipeline, by pipeline rank."""


def require_possible(problem: Problem) -> None:
    """Refuse what no search can mend.

    Raises:
        InfeasibleError: naming the field that is in the way.
    """
    job, devices = problem.job, len(problem.cluster.devices)
    remedy = f"or use {ONE_OF_SYNCHRONOUS}, which run any plan"
    if not job.replication:
        raise InfeasibleError(
            "job.replication: it is false, and pipelines that train side by side hold the same "
            f"stages; set replication = true in the job file, {remedy}"
        )
    if devices < 2:
        raise InfeasibleError(
            "cluster.devices: there is one, and pipelines that train side by side need one each at "
            f"least; add devices, {remedy}"
        )
    if not _numbers(problem):
        raise InfeasibleError(
            f"job.microbatches: {job.microbatches} cannot be divided among 2 to {devices} "
            "pipelines, which run as many each; make it a multiple of 2 in the job file, "
            f"{remedy}"
        )


def _numbers(problem: Problem) -> list[int]:
    """Return the numbers of pipelines that a plan may have."""
    most = min(len(problem.cluster.devices), problem.job.microbatches)
    return [n for n in range(2, most + 1) if problem.job.microbatches % n == 0]


def groupings_of(problem: Problem) -> Iterator[Grouping]:
    """Yield divisions of the devices into pipelines, by their types and by their speed."""
    seen: set[Grouping] = set()
    for number in reversed(_numbers(problem)):
        for grouping in (_of_one_mix(problem, number), _of_one_speed(problem, number)):
            if grouping[0] and grouping not in seen:
                seen.add(grouping)
                yield grouping


def _of_one_mix(problem: Problem, number: int) -> Grouping:
    """Give each pipeline as many devices of every type, neighbours in the cluster's order."""
    groups: list[list[str]] = [[] for _ in range(number)]
    for names in _by_speed(problem):
        each = len(names) // number
        for index, group in enumerate(groups):
            group += names[index * each : (index + 1) * each]
    order = problem.cluster.numbers
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)


def _of_one_speed(problem: Problem, number: int) -> Grouping:
    """Give each rank devices of about one speed; fewer are left over than by types.

    The last pipeline has the slowest.
    """
    names = [name for row in _by_speed(problem) for name in row]
    rows = [names[p * number : (p + 1) * number] for p in range(len(names) // number)]
    return tuple(tuple(row[index] for row in rows) for index in range(number))


def _by_speed(problem: Problem) -> list[list[str]]:
    """Return the devices of each type, the fastest type first."""
    table, cluster = StageTable(problem), problem.cluster
    model_s = table.arrays.seconds[:, :, :2].sum(axis=(1, 2))
    kinds = [table.types[number] for number in model_s.argsort(kind="stable")]
    return [
        [name for name in cluster.device_names if cluster.type_of(name) == kind] for kind in kinds
    ]


def description_of(grouping: Grouping) -> str:
    """Describe how many pipelines there are, and of what size."""
    return f"{plural(len(grouping), 'pipeline')} of up to {plural(len(grouping[0]), 'device')}"


def problem_of_one(problem: Problem, grouping: Grouping) -> Problem:
    """Return the problem of the last pipeline, which has the slowest devices.

    Devices forward nothing, so paths between those that stay are the same.
    """
    number = problem.job.microbatches // len(grouping)
    one = with_job(restricted_to(problem, grouping[-1]), microbatches=number, replication=False)
    return replace(one, copies=len(grouping))


def multiplied(problem: Problem, alone: Plan, grouping: Grouping) -> Plan:
    """Return the plan of one pipeline carried over to all.

    Raises:
        PipeplanError: if the other pipelines' devices do not hold it.
    """
    pipeline = place(problem, _stages(alone, grouping))
    if not is_connected(pipeline):
        raise PipeplanError("cluster.links: no path joins its devices to those of the others")
    counterparts = _counterparts(grouping)
    orders = spread_orders(alone.parsed_orders(), counterparts, pipeline.microbatches)
    timeline = _simulated(pipeline, orders)
    plan = assemble_plan(timeline, orders, 0.0, _provenance(alone, len(grouping)))
    problems = verify(plan)
    if problems:
        raise PipeplanError(problems)
    return plan


def _stages(alone: Plan, grouping: Grouping) -> list[StageSpec]:
    """Return each stage on its devices of all pipelines."""
    counterparts = _counterparts(grouping)
    return [
        StageSpec(
            stage.layers,
            tuple(names[device] for names in counterparts for device in stage.devices),
            stage.recompute,
        )
        for stage in alone.stages
    ]


def _counterparts(grouping: Grouping) -> list[dict[str, str]]:
    """Return each pipeline's device for those of the last pipeline, which was planned."""
    return [dict(zip(grouping[-1], group, strict=True)) for group in grouping]


def _simulated(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    try:
        return simulate(pipeline, orders)
    except DeadlockError:
        raise PipeplanError("orders: pipelines wait for each other in a circle") from None


def _provenance(alone: Plan, number: int) -> Provenance:
    solver = f"{alone.provenance.solver}, {plural(number, 'pipeline')}"
    return alone.provenance.model_copy(update={"solver": solver})
