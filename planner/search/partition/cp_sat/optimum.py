"""The best partition by the CP-SAT model alone, under constraints of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import PipeplanError
from planner.plan.problem import Problem
from planner.search.budget import Clock, Settings, run_solver
from planner.search.partition.bounds.partition import longest_plan_s, work_bound_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.candidates import even_partition
from planner.search.partition.chain import Chain
from planner.search.partition.cp_sat.decisions import OBJECTIVE_TICKS
from planner.search.partition.cp_sat.model import PartitionModel
from planner.search.partition.cp_sat.search import PRECISION, Constrain, PartitionSearch, add_own

LEAST_HORIZON_S = 1e-9
"""Where nothing takes any time a tick of the model still takes some."""
FIRST_SHARE = 0.3
"""Share of the time for a coarse estimate of the iteration time; the rest refines it."""
ROUGH = 0.02
"""The gap at which that is known well enough."""
NEAR = 1e-4
"""The gap at which a partition counts as optimal."""
MOST_ROUNDS = 50
"""Further searches at most, each without the partitions that were found before."""
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class PartitionOptimum:
    """What :func:`search_partition` found.

    Attributes:
        status: ``optimal``: no partition that keeps the constraints has a smaller objective (to
            a ten-thousandth); ``feasible``: the search ended before that was proved;
            ``infeasible``: no partition keeps them; ``unknown``: none was found in time.
        stages: layers and devices of each, and what it recomputes; none unless found.
        objective_s: no schedule of these stages is faster; infinity without.
        lower_bound_s: no plan with one stage a device that keeps the constraints is faster.
    """

    status: Status
    stages: tuple[StageSpec, ...]
    objective_s: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """Objective / lower bound - 1."""
        return self.objective_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


def search_partition(
    problem: Problem,
    *,
    constrain: Constrain | None = None,
    time_limit_s: float = 30.0,
    seed: int = 0,
    workers: int = 2,
    deterministic: bool = False,
) -> PartitionOptimum:
    """Minimise the bound on the iteration time over all partitions, with CP-SAT.

    Args:
        problem: the model, cluster and job.
        constrain: is called with the model's :class:`Decisions` and adds constraints to
            ``decisions.model``; it may be called several times, with different ones.
        time_limit_s: seconds, of CP-SAT's deterministic time in deterministic mode.
        seed: of the search.
        workers: threads.
        deterministic: one worker and a deterministic limit: the same answer on every machine.

    Raises:
        PipeplanError: if a setting is out of range, or ``constrain`` names a layer or device that
            is not there.
    """
    _check(time_limit_s, workers)
    chain = Chain(problem)
    settings = Settings(seed, workers, deterministic)
    clock = Clock(time_limit_s, deterministic)
    return _Search(chain, constrain, settings, clock).run(time_limit_s)


def _check(time_limit_s: float, workers: int) -> None:
    problems = []
    if not time_limit_s > 0:
        problems.append(f"time_limit_s: {time_limit_s} is not a positive number of seconds")
    if workers < 1:
        problems.append(f"workers: {workers} is not a whole number of at least 1")
    if problems:
        raise PipeplanError(problems)


class _Search:
    def __init__(
        self,
        chain: Chain,
        constrain: Constrain | None,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._chain = chain
        self._constrain = constrain
        self._settings = settings
        self._clock = clock
        self._max_stages = chain.max_stages

    def run(self, time_limit_s: float) -> PartitionOptimum:
        """Search within any horizon first, then within that of what was found."""
        least_s = work_bound_s(self._chain)
        longest_s, share_s = self._longest_s(), FIRST_SHARE * time_limit_s
        first = self._solve(longest_s, least_s, self._start(), share_s, ROUGH)
        if first.status == "unknown" and self._clock.left_s > 0:
            first = self._solve(longest_s, least_s, (), self._clock.left_s, ROUGH)
        if not first.stages or self._clock.left_s <= 0:
            return first
        known_s = first.objective_s + 2 * longest_s / OBJECTIVE_TICKS
        least_s, left_s = first.lower_bound_s, self._clock.left_s
        second = self._solve(known_s, least_s, first.stages, left_s, PRECISION)
        if second.stages:
            return self._refined(second)
        # What was found stands. Out of time the second bound holds, too; rounded off it does not.
        bounds = [first.lower_bound_s]
        bounds += [second.lower_bound_s] if second.status == "unknown" else []
        bound_s = min(max(bounds), first.objective_s)
        return PartitionOptimum("feasible", first.stages, first.objective_s, bound_s)

    def _refined(self, best: PartitionOptimum) -> PartitionOptimum:
        """Go on to other partitions where the model's objective is below that of its stages.

        The model rounds, and divides microbatches over replicas in fractions.
        """
        search = PartitionSearch(
            self._chain,
            self._max_stages,
            self._settings,
            self._clock,
            None,
            max(best.objective_s, LEAST_HORIZON_S),
            least_s=best.lower_bound_s,
            constrain=self._constrain,
        )
        stages, objective_s, bound_s = best.stages, best.objective_s, best.lower_bound_s
        for _ in range(MOST_ROUNDS):
            if objective_s <= bound_s * (1 + NEAR) or self._clock.left_s <= 0:
                break
            found = search.next(objective_s, self._clock.left_s)
            for plain, recomputed in zip(found.partitions, found.recomputed, strict=True):
                search.exclude(plain, self._bound_s(self._chain.specs(plain)))
                specs = self._chain.specs(recomputed)
                stages, objective_s = min(
                    (stages, objective_s), (specs, self._bound_s(specs)), key=lambda row: row[1]
                )
            bound_s = min(search.bound_s, objective_s)
        status: Status = "optimal" if objective_s <= bound_s * (1 + NEAR) else "feasible"
        return PartitionOptimum(status, stages, objective_s, bound_s)

    def _longest_s(self) -> float:
        return max(longest_plan_s(self._chain, self._max_stages), LEAST_HORIZON_S)

    def _start(self) -> tuple[StageSpec, ...]:
        """Return the best even partition to begin with; the constraints may rule it out."""
        best: tuple[float, tuple[StageSpec, ...]] = (float("inf"), ())
        for specs in self._even():
            if is_connected(place(self._chain.problem, specs)):
                best = min(best, (self._bound_s(specs), specs), key=lambda row: row[0])
        return best[1]

    def _bound_s(self, stages: tuple[StageSpec, ...]) -> float:
        """Return a time that no schedule of these stages beats, split backwards included."""
        problem = self._chain.problem
        return schedule_bound_s(place(problem, stages), split=problem.job.splits)

    def _even(self) -> Iterator[tuple[StageSpec, ...]]:
        for count in range(1, self._max_stages + 1):
            yield self._chain.specs(even_partition(self._chain, count))

    def _solve(
        self,
        horizon_s: float,
        least_s: float,
        start: tuple[StageSpec, ...],
        limit_s: float,
        precision: float,
    ) -> PartitionOptimum:
        model = PartitionModel(
            self._chain,
            horizon_s,
            self._max_stages,
            least_s=least_s,
            break_symmetry=self._constrain is None,
        )
        if self._constrain is not None:
            add_own(self._constrain, model.decisions)
        if start:
            model.hint(start)
            model.complete_hint(self._settings.solver(min(5.0, 0.2 * limit_s)), self._clock)
        solver = self._settings.solver(limit_s)
        solver.parameters.relative_gap_limit = precision
        status = run_solver(solver, model.model, self._clock)
        bound_s = max(least_s, solver.best_objective_bound * model.tick_s)
        if status == cp_model.INFEASIBLE:
            return PartitionOptimum("infeasible", (), float("inf"), float("inf"))
        if status == cp_model.UNKNOWN:
            return PartitionOptimum("unknown", (), float("inf"), bound_s)
        stages = model.stages(solver)
        objective_s = self._bound_s(stages)  # The model's own rounds up: it may be too high.
        proved = status == cp_model.OPTIMAL and precision == PRECISION
        bound_s = min(bound_s, objective_s)
        return PartitionOptimum("optimal" if proved else "feasible", stages, objective_s, bound_s)
