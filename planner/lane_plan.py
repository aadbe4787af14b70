"""A pipeline of a plan as a plan of its own, which the executor runs like any other."""

from __future__ import annotations

from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan, Sync
from planner.sync.lanes import Lane
from planner.verifier import predict, replay


def lane_plan(plan: Plan, lane: Lane) -> Plan:
    """The plan of one pipeline: its devices, and its microbatches numbered from 0.

    Its iteration time is predicted anew, without the other pipelines' synchronisation; no bound is
    claimed for it.

    Args:
        plan: that the pipeline is one of.
        lane: found by :func:`~planner.sync.lanes.lanes_of`.
    """
    number = {microbatch: index for index, microbatch in enumerate(lane.microbatches)}
    mine = set(lane.devices)
    orders = {
        device: " ".join(str(Operation(s, k, number[m])) for s, k, m in order)
        for device, order in plan.parsed_orders().items()
        if device in mine
    }
    stages = tuple(
        stage.model_copy(update={"devices": tuple(d for d in stage.devices if d in mine)})
        for stage in plan.stages
    )
    count = len(lane.microbatches)
    alone = plan.model_copy(
        update={
            "job": plan.job.model_copy(update={"microbatches": count}),
            "stages": stages,
            "microbatches": count,
            "orders": orders,
            "ranks": lane.devices,
            "sync": Sync(),
            "provenance": plan.provenance.model_copy(update={"problem_digest": None}),
        }
    )
    return alone.model_copy(update={"predicted": predict(replay(alone), 0.0)})
