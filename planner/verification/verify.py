"""Whether a plan holds: its form, its memory and what it predicts, by a replay of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from planner.units import format_bytes
from planner.verification.claims import claimed_times
from planner.verification.costs import PlanCosts
from planner.verification.form import form_problems, model_problems
from planner.verification.lengths import length_problems
from planner.verification.memory import HeldBytes, held_bytes
from planner.verification.proof.prove import proof_problems
from planner.verification.tasks import PlanTasks
from planner.verification.tensor_groups import contracted, divided_regions, group_problems
from planner.verification.time_shares import time_shares
from planner.verification.times import CheckedTimes

RELATIVE_TOLERANCE = 1e-6
DROP = "run `pipeplan simulate PLAN -o PLAN`, which drops the bound, or plan again"
REMEDY = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"


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
            seen = contracted(plan)
            problems = [*form_problems(seen, orders), *divided_regions(plan)]
        if not problems:
            problems = list(_replay_problems(plan, seen, orders))
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


def _replay_problems(plan: Plan, seen: Plan, orders: Orders) -> Iterator[str]:
    """Every problem that a replay shows; ``seen`` is the plan with groups as devices."""
    problem = seen.problem  # Refuses a graph, a cluster and a job that do not fit.
    costs = PlanCosts(seen)
    _require_paths(seen, costs)
    yield from _runtime(problem)
    stages = [(stage.layers, stage.devices) for stage in seen.stages]
    rules = broken(problem.job.rules, stages, problem.cluster)
    yield from (f"job.rules: {text}; plan again" for text in rules)
    tasks = PlanTasks(seen, orders, costs)
    checked = CheckedTimes(tasks, claimed_times(plan))
    wrong = [f"times: {problem}" for problem in checked.problems()]
    if wrong:
        yield from wrong
        return
    held = held_bytes(tasks, checked.times)
    yield from _memory(seen, costs, held)
    yield from _pipelines(seen)
    yield from _bound(plan, orders)
    yield from proof_problems(plan)
    yield from _predicted(seen, checked, held)
    yield from _time_shares(plan, checked)
    yield from length_problems(seen, orders, costs)


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


def _memory(plan: Plan, costs: PlanCosts, held_on: HeldBytes) -> Iterator[str]:
    for device, steps in held_on.items():
        capacity = costs.capacity_bytes(device)
        over = next(((time, held) for time, held in steps if held > capacity), None)
        if over:
            kind = plan.cluster.device_type(device)
            yield (
                f"memory of {device!r}: {format_bytes(over[1])} at {over[0]:.6f} s (peak "
                f"{format_bytes(_peak(steps))}), but it has {format_bytes(capacity)} "
                f"(memory_gib {kind.memory_gib:g} less reserved_gib {kind.reserved_gib:g}); "
                "give it fewer layers or fewer microbatches in flight"
            )


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


def _peak(steps: Sequence[tuple[float, int]]) -> int:
    return max(held for _, held in steps)


def _predicted(plan: Plan, found: CheckedTimes, held_on: HeldBytes) -> Iterator[str]:
    said, time_s = plan.predicted, found.iteration_time_s
    bound_s = min(said.lower_bound_s, time_s)
    if not _close(said.lower_bound_s, bound_s):
        yield (
            f"predicted.lower_bound_s: {said.lower_bound_s} s cannot be a bound, this "
            f"plan itself takes {time_s} s; plan again to have one proved"
        )
    fresh = {
        "iteration_time_s": time_s,
        "gap": _gap(time_s, bound_s),
        "bubble": found.bubble,
    }
    for name, value in fresh.items():
        told = getattr(said, name)
        if not _close(told, value):
            yield f"predicted.{name}: the plan says {told}, a simulation gives {value}; {REMEDY}"
    busy_s_on = found.busy_s
    if set(said.devices) != set(busy_s_on):
        yield f"predicted.devices: they are not the devices that hold a stage; {REMEDY}"
        return
    for device, busy_s in busy_s_on.items():
        row = said.devices[device]
        pairs = {
            "busy_s": (row.busy_s, busy_s),
            "peak_memory_bytes": (row.peak_memory_bytes, _peak(held_on[device])),
        }
        for name, (told, value) in pairs.items():
            if not _close(told, value):
                yield (
                    f"predicted.devices[{device!r}].{name}: the plan says {told:.9g}, "
                    f"a simulation gives {value:.9g}; {REMEDY}"
                )


def _time_shares(plan: Plan, found: CheckedTimes) -> Iterator[str]:
    """Plans of older versions do not say what their time comes from."""
    shares = time_shares(found) or {}
    for name, told in plan.predicted.time_provenance or ():
        share = shares.get(name)
        if not _close(told, share):
            yield f"predicted.time_provenance.{name}: the plan says {told}, it is {share}; {REMEDY}"


def _gap(time_s: float, bound_s: float) -> float | None:
    quotient = time_s / bound_s if bound_s > 0 else math.inf
    return max(0.0, quotient - 1) if math.isfinite(quotient) else None


def _close(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return abs(said - found) <= RELATIVE_TOLERANCE * max(abs(said), abs(found)) + 1e-12
