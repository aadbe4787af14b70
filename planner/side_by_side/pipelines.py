"""The problem of one pipeline of several, and its plan made one of all."""

from __future__ import annotations

from dataclasses import replace

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan, Provenance
from planner.artifacts.problem import Problem
from planner.assemble import assemble_plan
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import DeadlockError, PipeplanError
from planner.side_by_side.groupings import Grouping
from planner.simulator import Orders, Timeline, simulate
from planner.units import plural
from planner.verifier import verify


def problem_of_one(problem: Problem, grouping: Grouping) -> Problem:
    """The problem of the last pipeline, which has the slowest devices.

    Devices forward nothing, so paths between those that stay are the same.
    """
    mine, cluster, job = set(grouping[-1]), problem.cluster, problem.job
    left = {*mine, *cluster.switches}
    part = {
        "devices": tuple(device for device in cluster.devices if device.name in mine),
        "links": tuple(link for link in cluster.links if left.issuperset(link.between)),
    }
    share = {"microbatches": job.microbatches // len(grouping), "replication": False}
    return replace(
        problem, cluster=cluster.model_copy(update=part), job=job.model_copy(update=share)
    )


def multiplied(problem: Problem, alone: Plan, grouping: Grouping) -> Plan:
    """The plan of one pipeline, at the same places of all.

    Raises:
        PipeplanError: if the other pipelines' devices do not hold it.
    """
    pipeline = place(problem, _stages(alone, grouping))
    if not is_connected(pipeline):
        raise PipeplanError("cluster.links: no path joins its devices to those of the others")
    orders = _orders(alone, grouping)
    timeline = _simulated(pipeline, orders)
    plan = assemble_plan(timeline, orders, 0.0, _provenance(alone, len(grouping)))
    problems = verify(plan)
    if problems:
        raise PipeplanError(problems)
    return plan


def _stages(alone: Plan, grouping: Grouping) -> list[StageSpec]:
    """Each on its devices of all pipelines."""
    place_of = _places(grouping)
    return [
        StageSpec(
            stage.layers,
            tuple(group[place_of[device]] for group in grouping for device in stage.devices),
            stage.recompute,
        )
        for stage in alone.stages
    ]


def _orders(alone: Plan, grouping: Grouping) -> Orders:
    """All devices of a place run the same; pipelines take microbatches in turn."""
    place_of, number = _places(grouping), len(grouping)
    return {
        group[place_of[device]]: [
            Operation(stage, kind, microbatch * number + index) for stage, kind, microbatch in order
        ]
        for device, order in alone.parsed_orders().items()
        for index, group in enumerate(grouping)
    }


def _places(grouping: Grouping) -> dict[str, int]:
    """Of the last pipeline's devices, which are those that were planned."""
    return {device: index for index, device in enumerate(grouping[-1])}


def _simulated(pipeline: PlacedPipeline, orders: Orders) -> Timeline:
    try:
        return simulate(pipeline, orders)
    except DeadlockError:
        raise PipeplanError("orders: pipelines wait for each other in a circle") from None


def _provenance(alone: Plan, number: int) -> Provenance:
    solver = f"{alone.provenance.solver}, {plural(number, 'pipeline')}"
    return alone.provenance.model_copy(update={"solver": solver})
