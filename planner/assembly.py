"""Assembly of plans from the solvers' choices, and new predictions for edited plans."""

from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any

from planner.costs.placed_pipeline import PlacedPipeline
from planner.job import Job
from planner.plan.certificate import Proof
from planner.plan.operations import Orders, format_order
from planner.plan.plan import COST_MODEL, Plan, Provenance, within
from planner.plan.problem import Problem
from planner.prediction import predict, with_prediction
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.space import covers_nothing, widened


def assemble_plan(
    timeline: Timeline,
    orders: Orders,
    lower_bound_s: float,
    provenance: Provenance,
    proof: Proof | None = None,
) -> Plan:
    """Return the plan of a simulated schedule; the bound is recorded as proved for its problem.

    Args:
        timeline: of the schedule.
        orders: of its operations.
        lower_bound_s: no plan takes less; 0 if unknown.
        provenance: of the plan and its bound.
        proof: of the bound.
    """
    pipeline = timeline.pipeline
    problem = pipeline.problem
    record = problem.graph.record
    return Plan.model_validate(
        {
            "model": {
                "name": record.name,
                "factory": problem.source.factory,
                "arguments": problem.source.arguments,
                "graph_digest": problem.graph.digest,
                "graph": record,
            },
            "cluster": problem.cluster,
            "job": problem.job,
            "runtime": problem.runtime,
            "stages": tuple(
                {
                    "index": index,
                    "layers": stage.spec.layers,
                    "devices": stage.spec.devices,
                    "recompute": stage.spec.recompute,
                    "offload": stage.spec.offload,
                }
                for index, stage in enumerate(pipeline.stages)
            ),
            "microbatches": pipeline.microbatches,
            "orders": {device: format_order(list(orders[device])) for device in pipeline.devices},
            "ranks": ranks(problem, pipeline),
            "sync": within(problem.job, pipeline.sync),
            "predicted": predict(timeline, lower_bound_s),
            "provenance": provenance.model_copy(update={"problem_digest": problem.digest}),
            "proof": proof,
        }
    )


def ranks(problem: Problem, pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Return the devices in use, in the cluster's order: torchrun's rank 0 is the first."""
    used = set(pipeline.devices)
    return tuple(device for device in problem.cluster.device_names if device in used)


def plan_by_hand(pipeline: PlacedPipeline, orders: Orders, solver: str = "by hand") -> Plan:
    """Return a plan for stages and orders that our search did not choose; its bound is zero.

    Its job allows the kinds of backward that the orders have.

    Args:
        pipeline: the stages.
        orders: of each device.
        solver: who or what chose them, for the plan's provenance.
    """
    problem = pipeline.problem
    kinds = {operation.kind for order in orders.values() for operation in order} - {"F"}
    allowed = problem.job.model_copy(update={"backward": widened(problem.job.backward, kinds)})
    pipeline = replace(pipeline, problem=replace(problem, job=allowed))
    provenance = Provenance(
        pipeplan=version("pipeplan"),
        ortools=None,
        seed=0,
        workers=0,
        limit="none",
        solver=solver,
        bound_covers=covers_nothing("no bound was computed"),
        cost_model=COST_MODEL,
    )
    return assemble_plan(simulate(pipeline, orders), orders, 0.0, provenance)


def edited_plan(plan: Plan, timeline: Timeline, orders: Orders, edit: str) -> Plan:
    """Return a plan with other stages or orders, predicted again.

    The proved bound is kept or dropped as :func:`planner.prediction.refresh` says.

    Args:
        plan: before the edit.
        timeline: of the edited stages and orders.
        orders: of their operations.
        edit: what was changed, for the plan's provenance.
    """
    solver = f"{plan.provenance.solver}; {edit}"
    provenance = plan.provenance.model_copy(update={"solver": solver})
    made = assemble_plan(timeline, orders, 0.0, provenance)
    before = {"predicted": plan.predicted, "provenance": provenance, "proof": plan.proof}
    if plan.tensor_parallel is not None:
        before |= _of_single_devices(plan, made.job)
    return with_prediction(made.model_copy(update=before), timeline)


def _of_single_devices(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the fields of a plan of groups, whose devices an edit does not change.

    Args:
        plan: before the edit.
        job: after it, with the groups as devices.
    """
    kept = {name: getattr(plan.job, name) for name in ("cuts", *_GROUP_FREEDOMS)}
    return {
        "model": plan.model,
        "cluster": plan.cluster,
        "job": job.model_copy(update=kept),
        "tensor_parallel": plan.tensor_parallel,
    }


_GROUP_FREEDOMS = ("tensor_parallel", "sequence_parallel", "expert_parallel", "expert_load")


@cache
def version(distribution: str) -> str:
    """Return the installed version of a distribution; ``unknown`` if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
