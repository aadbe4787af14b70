"""The finished plan of a search, and why the search ended."""

from __future__ import annotations

from dataclasses import replace

from planner.assembly import assemble_plan, version
from planner.plan.certificate import Proof
from planner.plan.operations import numbered_by_losses
from planner.plan.plan import COST_MODEL, Plan, Provenance
from planner.plan.problem import Problem
from planner.plan.runtimes import LOSSES_IN_ORDER
from planner.search.result import Ended, Status
from planner.search.schedule.heuristic import Schedule
from planner.search.settings import OPTIMALITY_TOLERANCE
from planner.search.state import Search
from planner.simulation.simulator import reduced_soonest, simulate
from planner.space import BoundCovers
from planner.verification import require_valid


def limit_text(time_limit_s: float, deterministic: bool) -> str:
    """Return a time limit as it stands in a plan's provenance."""
    return f"{'deterministic' if deterministic else 'wall'} {time_limit_s:g} s"


def plan_of(search: Search, schedule: Schedule, limit: str, solver: str) -> Plan:
    """Return the verified plan of a schedule that a search found, with the bound it proved.

    Replicas that run no microbatch are left out.

    Args:
        search: that is over.
        schedule: of the search's problem, or of one that it is a relaxation of: the bound holds for
            that too.
        limit: of the search, see :func:`limit_text`.
        solver: what found the schedule.
    """
    bound_s = min(search.found.bound_s, search.best_s)
    provenance = _provenance(search, limit, solver)
    found = search.found
    proof = search.certifier.proof(bound_s, found.bound_source, found.bound_event)
    proof = proof and _about(schedule.timeline.pipeline.problem, proof)
    if search.problem.job.runtime in LOSSES_IN_ORDER:
        schedule = _numbered_by_losses(schedule)
    schedule = search.without_idle_replicas(schedule)
    timeline = reduced_soonest(schedule.timeline)
    plan = assemble_plan(timeline, schedule.orders, bound_s, provenance, proof)
    if not search.problem.has_groups:  # Such a plan is checked once it names their devices.
        require_valid(plan)
    return plan


def _about(problem: Problem, proof: Proof) -> Proof:
    """Return a proof with its certificate about a problem; verifying the plan checks it there."""
    certificate = proof.certificate
    if certificate is None:
        return proof
    certificate = certificate.model_copy(update={"problem_digest": problem.digest})
    return proof.model_copy(update={"certificate": certificate})


def _numbered_by_losses(schedule: Schedule) -> Schedule:
    """Return the schedule with microbatches numbered in the order of their losses."""
    pipeline = schedule.timeline.pipeline
    orders = numbered_by_losses(schedule.orders, len(pipeline.stages) - 1)
    return replace(schedule, orders=orders, timeline=simulate(pipeline, orders))


def _provenance(search: Search, limit: str, solver: str) -> Provenance:
    return Provenance(
        pipeplan=version("pipeplan"),
        ortools=version("ortools"),
        seed=search.settings.seed,
        workers=1 if search.settings.deterministic else search.settings.workers,
        limit=limit,
        solver=solver,
        bound_covers=BoundCovers(
            space=search.problem.job.space, own_constraints=search.task.constrain is not None
        ),
        cost_model=COST_MODEL,
    )


def status_of(search: Search, time_s: float) -> Status:
    """Return the status of a plan with this iteration time."""
    tolerance = min(search.task.gap_limit, OPTIMALITY_TOLERANCE)
    if time_s <= search.found.bound_s * (1 + tolerance):
        return "optimal"
    return "interrupted" if search.clock.is_stopped else "feasible"


def ended_by(search: Search) -> Ended:
    """Return why a search ended, asked at its end."""
    status = status_of(search, search.best_s)
    is_enough = search.best_s <= search.found.bound_s * (1 + search.task.gap_limit)
    return how_ended(status, is_enough=is_enough, has_time=search.has_time)


def how_ended(status: Status, *, is_enough: bool, has_time: bool) -> Ended:
    """Return why a search ended.

    Args:
        status: of its best plan.
        is_enough: whether that plan's gap is small enough.
        has_time: whether time was left to try more.
    """
    if status == "optimal":
        return "proved"
    if status == "interrupted":
        return "interrupted"
    if is_enough:
        return "gap limit"
    return "nothing left to try" if has_time else "time limit"
