"""The work of one point: the same function on this machine and on any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.artifacts.sweep import Point, SweepSettings, SweptPoint
from planner.errors import InfeasibleError, PipeplanError
from planner.result import Result
from planner.solver import solve
from planner.sweeping.devices import device_choices, part_of
from planner.units import plural

CHOICE_SHARE = 0.3
"""Of a point's time, to plan for each set of devices where there are several to choose from."""


@dataclass(frozen=True)
class Task:
    """A point to solve.

    Attributes:
        point: which.
        problem: with the whole cluster.
        settings: of the search.
        workers: threads of the solver.
    """

    point: Point
    problem: Problem
    settings: SweepSettings
    workers: int


@dataclass(frozen=True)
class Outcome:
    """What was found at a point, and the plan if there is one."""

    found: SweptPoint
    plan: Plan | None


def solve_task(task: Task) -> Outcome:
    """Solve a point; where no plan fits, the outcome says why.

    Raises:
        KeyboardInterrupt: on Ctrl-C; a search that was cut short counts for nothing.
    """
    try:
        result = _solve(task)
    except PipeplanError as error:
        return Outcome(without_plan(task.point, "; ".join(error.problems)), None)
    plan = result.plan
    found = SweptPoint(
        **task.point._asdict(),
        plan=task.point.plan_name,
        iteration_time_s=result.iteration_time_s,
        lower_bound_s=result.lower_bound_s,
        chosen=plan.cluster.device_names,
        used=plan.ranks,
    )
    return Outcome(found, plan)


def without_plan(point: Point, reason: str) -> SweptPoint:
    """A point that has none."""
    return SweptPoint(**point._asdict(), reason=reason)


def _solve(task: Task) -> Result:
    """With the devices of the fastest plan found in a short time, or all where there is no choice.

    Raises:
        PipeplanError: if no plan fits.
    """
    have = len(task.problem.cluster.devices)
    if task.point.devices > have:
        raise InfeasibleError(f"the cluster has only {plural(have, 'device')}")
    problems = _possible(task)
    if len(problems) == 1:
        return _search(task, problems[0], 1.0)
    first = _fastest(task, problems)
    rest = 1 - CHOICE_SHARE
    if first is None:
        # The last one has most memory.
        return _search(task, problems[-1], rest)
    if first.ended in ("proved", "gap limit"):
        return first
    return _search(task, first.plan.problem, rest, [first.plan])


def _possible(task: Task) -> list[Problem]:
    """Those whose devices can run every layer."""
    found, reasons = [], []
    for devices in device_choices(task.problem, task.point.devices):
        try:
            found.append(replace(task.problem, cluster=part_of(task.problem.cluster, devices)))
        except PipeplanError as error:
            reasons.append(error)
    if not found:
        raise reasons[-1]
    return found


def _fastest(task: Task, problems: Sequence[Problem]) -> Result | None:
    """Of short searches; None if none found a plan."""
    found = []
    for problem in problems:
        try:
            found.append(_search(task, problem, CHOICE_SHARE / len(problems)))
        except InfeasibleError:
            continue
    return min(found, key=lambda result: result.iteration_time_s) if found else None


def _search(task: Task, problem: Problem, share: float, warm_starts: Sequence[Plan] = ()) -> Result:
    settings = task.settings
    search = partial(solve, problem, warm_starts=warm_starts, workers=task.workers)
    result = search(
        time_limit_s=settings.time_limit_s * share,
        gap_limit=settings.gap_limit,
        seed=settings.seed,
        deterministic=settings.deterministic,
    )
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    return result
