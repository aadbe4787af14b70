"""Putting a plan together from what the solvers chose, and refreshing one that was edited."""

from importlib import metadata

from planner.artifacts.operations import format_order
from planner.artifacts.plan import COST_MODEL, Plan, Provenance
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline
from planner.simulator import Orders, Timeline, simulate
from planner.verifier import predict, replay

NOTHING_AFTER_EDIT = "nothing: the layer graph, the cluster or the job was edited after planning"
NOTHING_BEYOND = "nothing: this plan is faster than any of the space its bound was proved for"


def assemble_plan(
    timeline: Timeline, orders: Orders, lower_bound_s: float, provenance: Provenance
) -> Plan:
    """The plan of a simulated schedule; the bound is recorded as proved for its problem."""
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
            "stages": tuple(
                {
                    "index": index,
                    "layers": stage.spec.layers,
                    "devices": stage.spec.devices,
                    "recompute": stage.spec.recompute,
                }
                for index, stage in enumerate(pipeline.stages)
            ),
            "microbatches": pipeline.microbatches,
            "orders": {device: format_order(list(orders[device])) for device in pipeline.devices},
            "ranks": ranks(problem, pipeline),
            "predicted": predict(timeline, lower_bound_s),
            "provenance": provenance.model_copy(update={"problem_digest": problem.digest}),
        }
    )


def ranks(problem: Problem, pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Devices in use, in the cluster's order: torchrun's rank 0 is the first."""
    used = set(pipeline.devices)
    return tuple(device for device in problem.cluster.device_names if device in used)


def plan_by_hand(pipeline: PlacedPipeline, orders: Orders) -> Plan:
    """A plan for stages and orders that a person or a test chose; its bound is zero."""
    provenance = Provenance(
        pipeplan=version("pipeplan"),
        ortools=None,
        seed=0,
        workers=0,
        limit="none",
        solver="by hand",
        bound_covers="nothing: no bound was computed",
        cost_model=COST_MODEL,
    )
    return assemble_plan(simulate(pipeline, orders), orders, 0.0, provenance)


def refresh(plan: Plan) -> Plan:
    """The same plan with freshly simulated predictions, for one that was edited by hand.

    An edit of stages or orders leaves the proven bound, which holds for the problem, whatever the
    plan. After an edit of the problem itself nothing is proved any more: the bound becomes 0. So it
    does if the plan beats it, which one outside the bound's space may, with split backwards say.

    Raises:
        PipeplanError: if the plan cannot be simulated; see :func:`planner.verifier.replay`.
    """
    timeline = replay(plan)
    bound_s, provenance = plan.predicted.lower_bound_s, plan.provenance
    found = timeline.pipeline.problem.digest
    covers = None
    if found != provenance.problem_digest:
        covers = NOTHING_AFTER_EDIT
    elif timeline.iteration_time_s < bound_s * (1 - 1e-9):
        covers = NOTHING_BEYOND
    if covers is not None:
        bound_s = 0.0
        provenance = provenance.model_copy(update={"problem_digest": found, "bound_covers": covers})
    predicted = predict(timeline, bound_s)
    return plan.model_copy(update={"predicted": predicted, "provenance": provenance})


def version(distribution: str) -> str:
    """Installed version of a distribution; ``unknown`` in a checkout that is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
