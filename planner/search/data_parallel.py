"""The search for a fast plan of pipelines: every grouping first, then a bound on all plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.assembly import assemble_plan
from planner.costs.placed_pipeline import StageSpec
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.unsupported import require_without
from planner.search.clock import Clock
from planner.search.groupings import (
    Grouping,
    description_of,
    groupings_of,
    multiplied,
    problem_of_one,
    require_possible,
)
from planner.search.incumbent import Progress
from planner.search.result import Ended, HistoryRow, Result, Status
from planner.search.settings import DEFAULT_WORKERS, OPTIMALITY_TOLERANCE, check_settings
from planner.search.solve import solve
from planner.simulation.simulator import simulate_plan
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS, pipeline_replicas_of

SHARE = 0.5
"""Share of the time limit for plans of one pipeline; the rest is for the bound on all plans."""
_NO_TIME_S = 0.05
"""A search that begins after the limit still gives the plan that it tries first."""

Stages = Sequence[StageSpec]


def solve_data_parallel(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Progress | None = None,
    warm_starts: Sequence[Plan | Stages] = (),
) -> Result:
    """Find a fast plan of two pipelines or more, and bound how far it can be from the best plan.

    Times compared are those of pipelines in step, as the simulator of plans predicts. The bound is
    on plans of any form, so the gap also holds what it costs to have pipelines.

    Args:
        problem: the model, cluster and job.
        time_limit_s: of all searches together.
        gap_limit: stop a search once iteration time / lower bound - 1 is at most this.
        seed: of the searches.
        workers: threads of the solver.
        deterministic: as in :func:`planner.search.solve.solve`.
        progress: called with every better plan of pipelines, and every new bound.
        warm_starts: for the search over plans of any form, whose plan counts if it has pipelines.

    Raises:
        InfeasibleError: if no plan of pipelines was found; it says what is in the way.
        PipeplanError: if a setting is out of range.
    """
    check_settings(time_limit_s, gap_limit, seed, workers)
    require_without(
        problem.job,
        "a plan of data-parallel pipelines",
        instead="plan with equal_pipelines = true and a synchronous strategy",
    )
    require_possible(problem)
    settings = {"seed": seed, "workers": workers, "deterministic": deterministic}
    search = _Search(
        problem,
        Clock(time_limit_s, deterministic=deterministic),
        {"gap_limit": gap_limit, **settings},
        progress or (lambda row: None),
    )
    best = search.best_of_pipelines(SHARE * time_limit_s)
    return search.bounded(best, warm_starts)


@dataclass
class _Search:
    """The searches of one problem, and their findings so far.

    Attributes:
        problem: the whole one.
        clock: of all searches together.
        settings: of each search.
        report: called with every row of the history.
        best: of the plans of pipelines.
        history: of the search.
        reasons: why groupings gave no plan.
        tried: number of partitions that were scheduled.
    """

    problem: Problem
    clock: Clock
    settings: dict[str, Any]
    report: Progress
    best: Plan | None = None
    history: list[HistoryRow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    tried: int = 0

    def best_of_pipelines(self, limit_s: float) -> Plan:
        """Return the fastest plan over all groupings, which share the time that is left."""
        groupings = list(groupings_of(self.problem))
        for number, grouping in enumerate(groupings):
            self._try(grouping, (limit_s - self.clock.elapsed_s) / (len(groupings) - number))
            if self.clock.is_stopped:
                break
        if self.best is None:
            raise _nothing_found(self.reasons)
        return self.best

    def _try(self, grouping: Grouping, limit_s: float) -> None:
        try:
            alone = self._solve(problem_of_one(self.problem, grouping), limit_s)
            self.clock.spend(alone.search_s)
            self.tried += alone.tried
            plan = multiplied(self.problem, alone.plan, grouping)
        except PipeplanError as error:
            self.reasons.append(f"{description_of(grouping)}: {error.problems[0]}")
            return
        self._take_if_faster(plan, description_of(grouping))
        if alone.ended == "interrupted":
            self.clock.is_stopped = True

    def _take_if_faster(self, plan: Plan, words: str) -> None:
        if self.best is None or _time_s(plan) < _time_s(self.best):
            self.best = plan
            self._record(HistoryRow(self.clock.elapsed_s, _time_s(plan), 0.0, f"plan: {words}"))

    def bounded(self, best: Plan, warm_starts: Sequence[Plan | Stages]) -> Result:
        """Bound the best plan of pipelines by a search over all plans, which may beat it.

        Args:
            best: of the groupings.
            warm_starts: of that search, with the plan.
        """
        begun_s = self.clock.elapsed_s
        whole = self._solve(
            self.problem,
            self.clock.left_s(),
            progress=self._bounds_of(_time_s(best), begun_s),
            warm_starts=[*warm_starts, best],
        )
        whole = replace(whole, tried=self.tried + whole.tried, search_s=begun_s + whole.search_s)
        if _has_pipelines(whole.plan) and whole.iteration_time_s < _time_s(best):
            return replace(whole, history=(*self.history, *whole.history[-1:]))
        result = _with_bound_of(whole, best, interrupted=self.clock.is_stopped)
        return replace(result, history=tuple(self.history))

    def _bounds_of(self, time_s: float, begun_s: float) -> Progress:
        """Report bounds on all plans; plans of another form are not reported."""

        def report_bound(row: HistoryRow) -> None:
            if row.event.startswith("bound"):
                bound_s = min(row.lower_bound_s, time_s)
                self._record(HistoryRow(begun_s + row.time_s, time_s, bound_s, row.event))

        return report_bound

    def _solve(self, problem: Problem, limit_s: float, **others: Any) -> Result:
        return solve(problem, time_limit_s=max(limit_s, _NO_TIME_S), **self.settings, **others)

    def _record(self, row: HistoryRow) -> None:
        self.history.append(row)
        self.report(row)


def _time_s(plan: Plan) -> float:
    return plan.predicted.iteration_time_s


def _nothing_found(reasons: Sequence[str]) -> InfeasibleError:
    return InfeasibleError(
        "sync: no plan of several pipelines was found, and pipelines that train side by side "
        f"need one; {'; '.join(dict.fromkeys(reasons))}; use "
        f"{ONE_OF_SYNCHRONOUS}, which run any plan, or make a pipeline smaller"
    )


def _has_pipelines(plan: Plan) -> bool:
    try:
        return len(pipeline_replicas_of(plan)) > 1
    except PipeplanError:
        return False


def _with_bound_of(whole: Result, best: Plan, *, interrupted: bool) -> Result:
    """Return the plan of pipelines with the bound of a search over all plans."""
    bound_s = min(whole.lower_bound_s, _time_s(best))
    is_optimal = _time_s(best) <= bound_s * (1 + OPTIMALITY_TOLERANCE)
    stopped = interrupted or whole.ended == "interrupted"
    status, ended = _PROVED if is_optimal else _unproved(whole.ended, stopped)
    plan = _with_bound(best, bound_s, whole.plan)
    return replace(whole, status=status, plan=plan, lower_bound_s=bound_s, ended=ended)


_PROVED: tuple[Status, Ended] = ("optimal", "proved")


def _unproved(ended: Ended, stopped: bool) -> tuple[Status, Ended]:
    """Return status and end where the plan has a gap when the search over all plans ended."""
    if stopped:
        return "interrupted", "interrupted"
    # It ended for a plan of another form.
    return "feasible", "nothing left to try" if ended in ("proved", "gap limit") else ended


def _with_bound(plan: Plan, bound_s: float, proved: Plan) -> Plan:
    """Return the same plan with the bound of another, its provenance and its proof."""
    provenance = proved.provenance.model_copy(update={"solver": plan.provenance.solver})
    orders = plan.parsed_orders()
    return assemble_plan(simulate_plan(plan), orders, bound_s, provenance, proved.proof)
