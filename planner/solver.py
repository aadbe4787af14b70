"""The portfolio: candidate partitions are scheduled, CP-SAT improves both and proves a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.artifacts.plan import COST_MODEL, Plan, Provenance
from planner.artifacts.problem import Problem
from planner.assemble import assemble_plan, version
from planner.costs.placement import StageSpec
from planner.errors import InfeasibleError, PipeplanError
from planner.feasibility import explain_infeasible
from planner.partition.chain import Chain, Partition
from planner.portfolio.annealing import anneal
from planner.portfolio.descent import descend
from planner.portfolio.exact import improve_schedules, search_partitions
from planner.portfolio.first_plans import (
    find_any,
    optimise_partitions,
    schedule_thorough,
    schedule_warm_starts,
)
from planner.portfolio.robust import SHARE, RobustChoice, choose_robust
from planner.portfolio.search import Candidate, Progress, Search
from planner.portfolio.thrift import leave_out_replicas
from planner.result import Ended, Result, Robustness, Status
from planner.robustness import Noise
from planner.schedule.heuristic import Schedule
from planner.solver_settings import DEFAULT_WORKERS, Clock, Settings
from planner.units import plural
from planner.verifier import require_valid

if TYPE_CHECKING:
    from planner.partition.exact.search import Constrain

OPTIMALITY_TOLERANCE = 1e-4
"""Rounding to ticks alone costs up to this much; a smaller gap counts as proved optimal."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Progress | None = None,
    warm_starts: Sequence[Plan | Sequence[StageSpec]] = (),
    constrain: Constrain | None = None,
    robust: bool | Noise = False,
) -> Result:
    """Find the fastest plan for a problem and bound how far it can be from the best.

    Args:
        problem: the model, cluster and job.
        time_limit_s: stop after this long with the best plan so far; seconds of CP-SAT's
            deterministic time in deterministic mode.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        seed: of the solver's searches.
        workers: threads of the solver; by default one for each core, up to 8.
        deterministic: one worker and a deterministic limit: the same plan on every machine.
        progress: called with every new incumbent or bound.
        warm_starts: earlier plans of the model, perhaps for another job or cluster, or just
            stages; the search starts from them where the layers and devices still exist.
        constrain: adds constraints of one's own to the partition model's decisions, see
            docs/own_constraints.md; plans with several stages a device are left out then.
        robust: prefer a plan that keeps its time: of those found that are at most 2 % slower than
            the fastest, the one with the least 95th percentile of iteration times under a noise;
            True stands for ``Noise(seed=seed)``. A tenth of the time limit is for that choice.

    Raises:
        InfeasibleError: if no plan fits; the message says which constraint binds.
        PipeplanError: if a setting is out of range.
        KeyboardInterrupt: on Ctrl-C before any plan was found; later on Ctrl-C ends the search
            and the best plan so far is returned.
    """
    check_settings(time_limit_s, gap_limit, seed, workers)
    settings = Settings(seed, workers, deterministic)
    noise = Noise(seed=seed) if robust is True else robust or None
    clock = Clock(time_limit_s * (1 - SHARE if noise else 1), deterministic)
    report = progress or (lambda row: None)
    search = Search(problem, settings, clock, gap_limit, report, constrain)
    try:
        schedule_warm_starts(search, _partitions(search.chain, warm_starts))
        take_steps(search)
    except KeyboardInterrupt:
        clock.stop()
    return _result(search, limit_text(time_limit_s, deterministic), noise)


def take_steps(search: Search) -> None:
    """All steps of the portfolio, from the candidates that the search has already.

    Raises:
        KeyboardInterrupt: on Ctrl-C outside CP-SAT; what was found stands.
    """
    optimise_partitions(search)
    schedule_thorough(search)
    find_any(search)
    descend(search)
    anneal(search)
    leave_out_replicas(search)
    improve_schedules(search)
    search_partitions(search)
    leave_out_replicas(search)


def check_settings(time_limit_s: float, gap_limit: float, seed: int, workers: int) -> None:
    """What :func:`solve` asks of its settings.

    Raises:
        PipeplanError: naming every setting that is out of range.
    """
    problems = []
    if not time_limit_s > 0:
        problems.append(f"time_limit_s: {time_limit_s} is not a positive number of seconds")
    if not gap_limit >= 0:
        problems.append(f"gap_limit: {gap_limit} is not a number of at least 0, such as 0.01")
    if not 0 <= seed < 2**31:
        problems.append(f"seed: {seed} is not a whole number from 0 to {2**31 - 1}")
    if not 1 <= workers <= 1024:
        problems.append(f"workers: {workers} is not a whole number from 1 to 1024")
    if problems:
        raise PipeplanError(problems)


def limit_text(time_limit_s: float, deterministic: bool) -> str:
    """A time limit as a plan's provenance tells it."""
    return f"{'deterministic' if deterministic else 'wall'} {time_limit_s:g} s"


def _partitions(chain: Chain, plans: Sequence[Plan | Sequence[StageSpec]]) -> list[Partition]:
    """The stages of earlier plans that are still partitions of the chain."""
    found = []
    for plan in plans:
        stages = plan.stages if isinstance(plan, Plan) else plan
        partition = chain.partition([(stage.layers, stage.devices) for stage in stages])
        if partition is not None:
            found.append(partition)
    return found


def _result(search: Search, limit: str, noise: Noise | None) -> Result:
    """The verified plan of the incumbent, or of one that keeps its time better."""
    best = found_by(search)
    ended = ended_by(search)
    choice = _choice(search, noise)
    if search.clock.is_stopped:
        ended = ended_by(search)
    schedule = choice.schedule if choice else best.schedule
    robustness = choice.robustness if choice else None
    plan = plan_of(search, schedule, limit, _method(schedule.method, robustness))
    history = tuple(search.history)
    return Result(
        status=_status(search, schedule.iteration_time_s),
        plan=plan,
        lower_bound_s=min(search.bound_s, search.best_s),
        history=history,
        tried=search.tried,
        ended=ended,
        search_s=search.clock.elapsed_s,
        deterministic=search.settings.deterministic,
        robustness=robustness,
    )


def found_by(search: Search) -> Candidate:
    """The fastest candidate of a search.

    Raises:
        InfeasibleError: if no plan fits, or none was found; the message says what is in the way.
        KeyboardInterrupt: if the search was stopped before.
    """
    if search.best is not None:
        return search.best
    if search.clock.is_stopped:
        raise KeyboardInterrupt("before any plan was found")
    if search.constrain is not None:
        verdict = "no plan keeps" if search.infeasible else "no plan was found that keeps"
        raise InfeasibleError(
            f"{verdict} the constraints added by constrain=; solve without them, or one by "
            "one, to see which of them, or the memory, is in the way"
        )
    raise explain_infeasible(search.chain, is_proved=search.infeasible)


def plan_of(search: Search, schedule: Schedule, limit: str, solver: str) -> Plan:
    """The plan of a schedule that a search found, verified, with what the search proved.

    Args:
        search: that is over.
        schedule: of the search's problem.
        limit: of the search, see :func:`limit_text`.
        solver: what found the schedule.
    """
    bound_s = min(search.bound_s, search.best_s)
    provenance = _provenance(search, limit, solver)
    plan = assemble_plan(schedule.timeline, schedule.orders, bound_s, provenance)
    require_valid(plan)
    return plan


def _choice(search: Search, noise: Noise | None) -> RobustChoice | None:
    """None also after Ctrl-C: the fastest plan stands then."""
    try:
        return choose_robust(search, noise) if noise is not None else None
    except KeyboardInterrupt:
        search.clock.stop()
        return None


def _method(method: str, robustness: Robustness | None) -> str:
    text = f"partition portfolio, schedule by {method}"
    if robustness is None:
        return text
    return f"{text}, chosen for robustness under noise ({robustness.noise})"


def _status(search: Search, time_s: float) -> Status:
    """Of a plan with this iteration time."""
    tolerance = min(search.gap_limit, OPTIMALITY_TOLERANCE)
    if time_s <= search.bound_s * (1 + tolerance):
        return "optimal"
    return "interrupted" if search.clock.is_stopped else "feasible"


def ended_by(search: Search) -> Ended:
    """Why a search is over, asked as it is."""
    if _status(search, search.best_s) == "optimal":
        return "proved"
    if search.clock.is_stopped:
        return "interrupted"
    if search.best_s <= search.bound_s * (1 + search.gap_limit):
        return "gap limit"
    return "nothing left to try" if search.has_time else "time limit"


def _provenance(search: Search, limit: str, solver: str) -> Provenance:
    per_device = search.problem.job.max_stages_per_device
    return Provenance(
        pipeplan=version("pipeplan"),
        ortools=version("ortools"),
        seed=search.settings.seed,
        workers=1 if search.settings.deterministic else search.settings.workers,
        limit=limit,
        solver=solver,
        bound_covers=(
            f"every plan that cuts the chain of layers, with up to "
            f"{plural(per_device, 'stage')} a device, whole backwards and "
            + ("any layers recomputed" if search.problem.job.recompute else "no recompute")
            + (", under constraints of one's own" if search.constrain is not None else "")
        ),
        cost_model=COST_MODEL,
    )
