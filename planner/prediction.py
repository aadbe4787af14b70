"""Predicted figures of plans, and new ones for plans that were edited or use older costs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from planner.costs.placement import is_connected, place_plan
from planner.errors import DeadlockError, PipeplanError
from planner.plan.membership import Outside, outside_bound, outside_packing, outside_state
from planner.plan.operations import Orders
from planner.plan.plan import COST_MODEL, Plan, Predicted, Sync, gap, within
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.runtimes import rules_of
from planner.simulation.lengths import predicted_by_length
from planner.simulation.simulator import simulate
from planner.simulation.time_provenance import time_provenance
from planner.simulation.timeline import Timeline
from planner.space import Space, covers_nothing
from planner.verification.form import order_problems, stage_problems

NOTHING_AFTER_EDIT = covers_nothing(
    "the layer graph, the cluster, the job or the runtime was edited after planning"
)
NOTHING_BEYOND = covers_nothing("this plan lies outside the space that its bound was proved for")
NOTHING_OF_OTHER_COSTS = covers_nothing(
    "its bound was proved under another revision of the cost model"
)
logger = logging.getLogger(__name__)


def predict(timeline: Timeline, lower_bound_s: float) -> Predicted:
    """Return the predicted figures of a plan, from a simulation and a proven bound."""
    bound = min(lower_bound_s, timeline.iteration_time_s)
    return Predicted.model_validate(
        {
            "iteration_time_s": timeline.iteration_time_s,
            "lower_bound_s": bound,
            "gap": gap(timeline.iteration_time_s, bound),
            "bubble": timeline.bubble,
            "devices": {
                device: {
                    "busy_s": timeline.busy_s[device],
                    "peak_memory_bytes": timeline.peak_memory_bytes[device],
                }
                for device in timeline.pipeline.devices
            },
            "time_provenance": time_provenance(timeline),
            "lengths": predicted_by_length(timeline),
        }
    )


def replay(plan: Plan) -> Timeline:
    """Simulate a plan that need not be valid: it may overflow memory or predict another time.

    Raises:
        PipeplanError: naming what cannot be simulated, such as an unknown layer.
    """
    orders, plan = plan.parsed_orders(), plan.on_groups
    problems = [*stage_problems(plan), *order_problems(plan, orders)]
    if problems:
        raise PipeplanError(problems)
    return _simulated(plan, orders)


def _simulated(plan: Plan, orders: Orders) -> Timeline:
    pipeline = place_plan(plan)
    if not is_connected(pipeline):
        raise PipeplanError("stages: two devices that must exchange data have no path of links")
    return simulate(pipeline, orders)


def refresh(plan: Plan) -> Plan:
    """Return the plan with new predictions, for one that was edited manually.

    An edit of stages or orders keeps the proved bound, which holds for the problem. After an edit
    of the problem itself, or under another revision of the cost model, the bound becomes 0. The
    same happens if the plan lies outside the space that the bound covers.

    Raises:
        PipeplanError: if the plan cannot be simulated; see :func:`replay`.
    """
    return with_prediction(plan, replay(plan))


def with_prediction(plan: Plan, timeline: Timeline) -> Plan:
    """Return the plan with the figures of its simulation; its bound is as :func:`refresh` says."""
    bound_s, provenance = plan.predicted.lower_bound_s, plan.provenance
    problem, space = timeline.pipeline.problem, provenance.bound_covers.space
    covers, proof = None, plan.proof
    if provenance.cost_model != COST_MODEL:
        covers = NOTHING_OF_OTHER_COSTS
    elif space is None or provenance.problem_digest not in plan.digests_in(space):
        covers = NOTHING_AFTER_EDIT if space is not None or bound_s > 0 else None
    elif timeline.iteration_time_s < bound_s * (1 - 1e-9) or any(_outside_bound(plan, space)):
        covers = NOTHING_BEYOND
    if covers is not None:
        bound_s, proof = 0.0, None
        fresh = {"problem_digest": problem.digest, "bound_covers": covers, "cost_model": COST_MODEL}
        provenance = provenance.model_copy(update=fresh)
    predicted = predict(timeline, bound_s)
    fresh_figures = {"predicted": predicted, "provenance": provenance, "proof": proof}
    return plan.model_copy(update=fresh_figures)


def _outside_bound(plan: Plan, space: Space) -> Iterator[Outside]:
    orders = plan.parsed_orders()
    yield from outside_bound(space, plan.stages, orders, plan.layers, plan.bucket_bytes)
    yield from outside_packing(space, plan)
    yield from outside_state(space, plan)


def with_strategy(plan: Plan, sync: Sync) -> Plan:
    """Return the plan with another strategy of synchronisation, and new predictions.

    Raises:
        PipeplanError: if the plan cannot be simulated; see :func:`replay`.
    """
    return refresh(plan.model_copy(update={"sync": within(plan.job, sync)}))


def load_plan(path: str | Path, runtime: str | None = None) -> Plan:
    """Read a plan file; predict it again if it is from another revision of the cost model.

    It loses its bound then, and a warning is logged. ``planner.verify`` checks whether the plan is
    valid.

    Args:
        path: of the plan.
        runtime: name or file of another runtime that will run it, which predicts it again.

    Raises:
        PipeplanError: naming every wrong field, a format that this version does not read, or why
            the runtime cannot run the plan.
    """
    rules = None if runtime is None else rules_of(runtime)
    plan = Plan.load(path)
    if rules is not None:
        return run_by(plan, rules)
    return plan if plan.provenance.cost_model == COST_MODEL else _predicted_again(plan, str(path))


def run_by(plan: Plan, rules: RuntimeRules) -> Plan:
    """Return a plan as another runtime runs it, with new predictions.

    Raises:
        PipeplanError: if its devices would wait for each other in a circle, or the plan cannot be
            simulated; see :func:`replay`.
    """
    try:
        return refresh(plan.model_copy(update={"runtime": rules}))
    except DeadlockError as error:
        raise PipeplanError(
            f"runtime: {error} under the rules of {rules.name}, whose messages block; order its "
            "operations again with `pipeplan plan PLAN --runtime`, or choose another runtime"
        ) from None


def _predicted_again(plan: Plan, source: str) -> Plan:
    """Return the plan with new predictions; one that cannot be simulated stays as it is."""
    try:
        made = refresh(plan)
    except PipeplanError:
        return plan
    time = f"{made.predicted.iteration_time_s:.6g}"
    earlier = f"{plan.predicted.iteration_time_s:.6g}"
    logger.warning(
        "%s: predicted again, since it is from another revision of the cost model: "
        "iteration_time_s %s; its bound is dropped, `pipeplan plan --warm-start` proves another",
        source,
        f"stays {time}" if time == earlier else f"is {time}, was {earlier}",
    )
    return made
