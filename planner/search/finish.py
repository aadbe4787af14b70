"""The plan of what a search has found, and the stages that an earlier plan brings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from planner.assembly import assemble_plan, version
from planner.costs.placed_pipeline import StageSpec
from planner.plan.certificate import Proof, UncheckedBound
from planner.plan.operations import Orders, numbered_by_losses
from planner.plan.plan import COST_MODEL, Plan, Provenance, gap
from planner.plan.problem import Problem
from planner.plan.runtimes import LOSSES_IN_ORDER
from planner.search.cp_sat.decide import METHOD
from planner.search.incumbent import Found, Incumbent
from planner.search.result import Reason
from planner.search.settings import Settings
from planner.search.variants import Variant
from planner.search.walk.starts import Start
from planner.simulation.simulator import simulate
from planner.space import BoundCovers

CONFIRMED = 1 - 1e-6
"""A bound counts as certified if this share of it is: the verifier's tolerance."""


def finished_plan(
    taken: Found, reason: Reason | None, found: Incumbent, settings: Settings, variant: Variant
) -> Plan:
    """Return the plan of a schedule, with the bound of its own size of groups.

    Args:
        taken: the schedule.
        reason: why it was chosen among others; None: it is the fastest.
        found: what the search found besides.
        settings: of the search.
        variant: the size of groups.
    """
    timeline, problem = taken.timeline, taken.timeline.pipeline.problem
    orders: Orders = timeline.orders
    if problem.job.runtime in LOSSES_IN_ORDER:
        orders = numbered_by_losses(orders, len(timeline.pipeline.stages) - 1)
        timeline = simulate(timeline.pipeline, orders)
    provenance = Provenance(
        pipeplan=version("pipeplan"),
        ortools=version("ortools"),
        seed=settings.seed,
        workers=settings.threads,
        limit=settings.limit_text,
        solver=taken.method if reason is None else f"{taken.method}, {reason.provenance}",
        bound_covers=BoundCovers(
            space=variant.problem.job.space, own_constraints=settings.constrain is not None
        ),
        cost_model=COST_MODEL,
    )
    proof = None
    if found.proved is not None and found.proved.bound_s > 0:
        unchecked = None
        if found.proved.bound_s < found.bound_s * CONFIRMED:
            unchecked = UncheckedBound(bound_s=found.bound_s, source="solver", method=METHOD)
        proof = Proof(certificate=found.proved.certificate(problem), unchecked=unchecked)
    plan = assemble_plan(timeline, orders, found.bound_s, provenance, proof)
    if variant.whole is variant.problem:
        return plan
    return plan.of_problem(variant.whole, variant.parallel)


def bounded_over(plan: Plan, problem: Problem, bound_s: float, variants: Sequence[Variant]) -> Plan:
    """Return a plan with the bound over all sizes of groups, of which there is no certificate.

    Args:
        plan: the best of all sizes.
        problem: of single devices, with microbatches of the plan's size.
        bound_s: the least bound of all sizes.
        variants: the sizes.
    """
    space, covers = problem.job.space, plan.provenance.bound_covers
    packings = (row.parallel for row in variants if row.parallel is not None)
    mixed = tuple(row.digest for row in packings if len(row.degrees) > 1)
    words = ", ".join(row.words for row in variants)
    provenance = plan.provenance.model_copy(
        update={
            "solver": f"{plan.provenance.solver}; the best of {words}",
            "bound_covers": covers.model_copy(update={"space": space, "packings": mixed}),
            "problem_digest": problem.digest_in(space),
        }
    )
    figures = {"lower_bound_s": bound_s, "gap": gap(plan.predicted.iteration_time_s, bound_s)}
    predicted = plan.predicted.model_copy(update=figures)
    update = {"provenance": provenance, "predicted": predicted, "proof": None}
    return plan.model_copy(update=update)


def starts_of(problem: Problem, known: Sequence[Plan | Sequence[StageSpec]]) -> Iterator[Start]:
    """Yield the stages of earlier plans that are intervals of the problem's layers on its devices.

    Args:
        problem: whose devices may be groups.
        known: plans, or stages.
    """
    names, numbers = tuple(problem.graph.layers), problem.cluster.numbers
    for row in known:
        stages = row.on_groups.stages if isinstance(row, Plan) else row
        layers = tuple(name for stage in stages for name in stage.layers)
        devices = [name for stage in stages for name in stage.devices]
        if layers != names or not all(name in numbers for name in devices):
            continue
        ends = tuple(accumulate(len(stage.layers) for stage in stages))
        yield Start(ends, tuple(tuple(numbers[n] for n in stage.devices) for stage in stages))
