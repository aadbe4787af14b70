"""Whether a plan holds: its form, the times claimed for it, its memory and what it predicts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

from planner.errors import PipeplanError, first_problems
from planner.plan.kept_rules import broken
from planner.plan.membership import outside_bound, outside_packing, outside_state
from planner.plan.operations import Orders
from planner.plan.plan import COST_MODEL, Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import for_runtime
from planner.space import Space
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.sync.strategies import SYNCHRONOUS
from planner.verification.claims import Claims
from planner.verification.costs import PlanCosts
from planner.verification.form import (
    divided_regions,
    form_problems,
    group_problems,
    model_problems,
)
from planner.verification.memory import held_bytes, memory_problems
from planner.verification.predicted import predicted_problems
from planner.verification.proof.prove import proof_problems
from planner.verification.tasks import PlanTasks
from planner.verification.times import CheckedTimes

DROP = "run `pipeplan simulate PLAN -o PLAN`, which drops the bound, or plan again"


def verify(plan: Plan) -> list[str]:
    """Check a plan.

    Args:
        plan: read from its file, or made by a search.

    Returns:
        One line a problem, each naming the field, and the rest counted where they are many; empty
        if the plan holds: stages, devices, orders, written buffers, memory and messages are those
        that the job, the cluster and the runtime allow, and predictions and bound are right.

    Raises:
        PipeplanError: if it is given something else than a plan, such as the path of one.
    """
    if not isinstance(plan, Plan):
        raise PipeplanError(
            f"verify(plan): {plan!r} is no plan; read the file first: "
            'verify(planner.load_plan("plan.json"))'
        )
    try:
        orders = plan.parsed_orders()
        problems = [*model_problems(plan), *group_problems(plan)]
        if not problems:
            # With groups as devices, but the job as it was given.
            seen = plan.on_groups.model_copy(update={"job": plan.job})
            problems = [*form_problems(seen, orders), *divided_regions(plan)]
        if not problems:
            with collector_paused():
                problems = list(_running_problems(plan, seen, orders))
    except PipeplanError as error:
        return list(error.problems)
    return list(first_problems(problems))


def require_valid(plan: Plan, source: str = "plan") -> None:
    """Raise unless the plan holds.

    Raises:
        PipeplanError: with every problem :func:`verify` finds.
    """
    problems = verify(plan)
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)


def save_valid(plan: Plan, path: str | Path) -> None:
    """Verify a plan, then write it as JSON, atomically.

    Raises:
        PipeplanError: if the plan does not hold; nothing is written then.
    """
    require_valid(plan, str(path))
    plan.save(path)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python from looking for circles of references among many small tasks or operations.

    There are none, and it took a quarter of the time to verify a plan on 1,024 devices.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _running_problems(plan: Plan, seen: Plan, orders: Orders) -> Iterator[str]:
    """Every problem that shows in costs and times; ``seen`` is the plan with groups as devices."""
    problem = plan.problem  # Refuses a graph, a cluster and a job that do not fit.
    costs = PlanCosts(seen)
    _require_paths(seen, costs)
    yield from _runtime(problem)
    stages = [(stage.layers, stage.devices) for stage in seen.stages]
    rules = broken(problem.job.rules, stages, problem.cluster)
    yield from (f"job.rules: {text}; plan again" for text in rules)
    tasks, claims = PlanTasks(seen, orders, costs), Claims(plan)
    checked = CheckedTimes(tasks, claims.times)
    wrong = [f"times: {problem}" for problem in checked.problems()]
    if wrong:
        yield from wrong
        return
    held = held_bytes(tasks, checked.times)
    yield from memory_problems(tasks, held)
    yield from _pipelines(seen)
    yield from _bound(plan, orders)
    yield from proof_problems(plan)
    yield from predicted_problems(seen, checked, held, claims)


def _runtime(problem: Problem) -> Iterator[str]:
    """The job gives no freedom that its runtime cannot express."""
    job, able = problem.job, for_runtime(problem).job
    for name in Space.model_fields:
        if getattr(job, name) != getattr(able, name):
            yield (
                f"job.{name}: gives more than {job.runtime} can run; plan again with `--runtime "
                f"{job.runtime}`, or set job.runtime to null"
            )


def _require_paths(plan: Plan, costs: PlanCosts) -> None:
    for first, second in pairwise(plan.stages):
        # One of those that are attached alike stands for all.
        sources, targets = (
            {costs.routes.attachment(device): device for device in stage.devices}.values()
            for stage in (first, second)
        )
        for source, target in product(sources, targets):
            costs.routes.require_path(source, target)


def _pipelines(plan: Plan) -> Iterator[str]:
    """Strategies between pipelines need some."""
    if plan.sync.strategy in SYNCHRONOUS:
        return
    try:
        pipeline_replicas_of(plan)
    except PipeplanError as error:
        for problem in error.problems:
            yield f"sync.strategy: {plan.sync.strategy!r} needs pipelines, but {problem}"


def _bound(plan: Plan, orders: Orders) -> Iterator[str]:
    """The bound is for this problem, and for a space in which the plan lies.

    One that was proved for another problem may be above the time of a better plan.
    """
    said, space = plan.provenance.problem_digest, plan.provenance.bound_covers.space
    if plan.predicted.lower_bound_s <= 0:
        return
    if space is None:
        yield (
            f"provenance.bound_covers: {plan.provenance.bound_covers}, but "
            f"predicted.lower_bound_s is {plan.predicted.lower_bound_s}; {DROP}"
        )
        return
    found = plan.digests_in(space)
    if plan.provenance.cost_model != COST_MODEL:
        yield (
            f"provenance.cost_model: {plan.provenance.cost_model}, expected {COST_MODEL}: "
            f"predicted.lower_bound_s was proved under another revision of the cost model; {DROP}"
        )
    elif said not in found:
        yield (
            f"provenance.problem_digest: {'none' if said is None else said[:19] + '…'}, but the "
            f"plan's layer graph, cluster, job and runtime have {found[0][:19]}…: "
            f"predicted.lower_bound_s was proved for another problem; {DROP}"
        )
    else:
        beyond = [
            *outside_bound(space, plan.stages, orders, plan.layers, plan.bucket_bytes),
            *outside_packing(space, plan),
            *outside_state(space, plan),
        ]
        yield from (freedom.in_bound() for freedom in beyond)
