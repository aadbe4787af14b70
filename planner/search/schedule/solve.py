"""Improve a schedule of given stages with CP-SAT, and bound every schedule of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import DeadlockError
from planner.plan.operations import Orders, owners
from planner.search.budget import Clock, SearchWork, Settings, run_solver
from planner.search.schedule.heuristic import Schedule
from planner.search.schedule.measure import Measure, measured_s, timed
from planner.search.schedule.memory_shares import Shares, divides_memory, search_shares
from planner.search.schedule.ticks import TickPipeline, in_ticks
from planner.simulation.simulator import replay_objects, simulate
from planner.space import Backward

MAX_FREE_OPERATIONS = 80
"""The most (operation, replica) pairs for which CP-SAT also chooses the replicas."""
MAX_OPERATIONS = 6000
"""Beyond this the model takes longer to build than it gains; the heuristic schedule stands."""
MOST_ROUNDS = 8
"""Rounds of the model, each with more room kept for tensors in transfer."""
SHARES_SHARE = 0.15
"""Share of the time in which memory is divided among the stages of each device."""
DIVIDED_SHARE = 0.65
"""Share of the time after which the model with divided memory gives way to the full one."""
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class ScheduleTask:
    """The means and the aim of a search for schedules.

    Attributes:
        settings: of CP-SAT.
        clock: deterministic time is booked on it.
        measure: what is to be small.
        backward: kinds of backward that schedules may have. Of ``any``, a backward runs whole where
            that is quicker than its parts and the solver chooses so.
    """

    settings: Settings
    clock: Clock
    measure: Measure = "makespan"
    backward: Backward = "whole"

    def measured_s(self, schedule: Schedule) -> float:
        """Return what is to be small of a schedule."""
        return measured_s(schedule.timeline, self.measure)


def improve_schedule(
    pipeline: PlacedPipeline, start: Schedule, task: ScheduleTask, limit_s: float
) -> Schedule:
    """Search for a better schedule than ``start`` for the same stages on the same devices.

    Args:
        pipeline: the stages.
        start: a schedule within memory; the result is never worse.
        task: the means and the aim.
        limit_s: for this call.

    Returns:
        The best schedule, with a lower bound on the measure over all schedules of these stages
        (0 if the search was restricted and proves nothing).
    """
    job = pipeline.problem.job
    if len(start.timeline.operations) > MAX_OPERATIONS or job.order == "1f1b":
        return start
    return _Improvement(pipeline, task, limit_s, task.clock.elapsed_s).of(start)


@dataclass(frozen=True)
class _Found:
    """CP-SAT's orders, None if it found none, and its bound: 0 if that proves nothing."""

    orders: Orders | None
    bound_s: float


@dataclass(frozen=True)
class _Improvement:
    """The arguments of :func:`improve_schedule`, and when it began."""

    pipeline: PlacedPipeline
    task: ScheduleTask
    limit_s: float
    begin_s: float

    def of(self, start: Schedule) -> Schedule:
        """Return the best schedule found from one on."""
        if divides_memory(self.pipeline):
            start = self._within_shares(start)
            if self.task.measured_s(start) <= start.lower_bound_s * ROUNDING:
                return start
        best, kept = start, Counter[str]()
        for number in range(MOST_ROUNDS):
            left_s = self._left_s(1.0)
            if number and left_s <= 0:
                break
            found = self._solved(start, left_s, kept_bytes=kept)
            if number == 0:
                best = _with_bound(best, found.bound_s, self.task.measure)
            schedule = self._replayed(found.orders)
            if schedule is None:
                break
            over = schedule.timeline.overflow_bytes
            if not over:
                return _better(best, schedule, self.task.measure)
            # The model leaves out tensors on their way: once more, with room kept for them.
            kept.update(over)
        return best

    def _within_shares(self, start: Schedule) -> Schedule:
        """Improve with memory divided among the stages of each device."""

        def may_go_on(operations: int) -> bool:
            self.task.clock.charge(SearchWork.SIMULATED_OPERATION, operations)
            return self._left_s(SHARES_SHARE) > 0

        shared = search_shares(
            self.pipeline,
            split=self.task.backward != "whole",
            measure=self.task.measure,
            seed=self.task.settings.seed,
            may_go_on=may_go_on,
        )
        if shared is None:
            return start
        start = _better(start, shared.schedule, self.task.measure)
        left_s = self._left_s(DIVIDED_SHARE)
        if left_s <= 0:
            return start
        found = self._solved(shared.schedule, left_s, shares=shared.shares)
        schedule = self._replayed(found.orders)
        if schedule is None or schedule.timeline.overflow_bytes:
            return start
        return _better(start, schedule, self.task.measure)

    def _left_s(self, share: float) -> float:
        """Return the time left of the first share of this search's time."""
        end_s = self.begin_s + share * self.limit_s
        return min(end_s - self.task.clock.elapsed_s, self.task.clock.left_s)

    @cached_property
    def _ticks(self) -> TickPipeline:
        return in_ticks(self.pipeline)

    def _solved(
        self,
        start: Schedule,
        limit_s: float,
        *,
        kept_bytes: Mapping[str, int] | None = None,
        shares: Shares | None = None,
    ) -> _Found:
        from ortools.sat.python import cp_model

        from planner.search.schedule.cp_sat.model import ScheduleModel

        model = ScheduleModel(
            self._ticks,
            # The compiled replay knows no ticks.
            timed(replay_objects(self._ticks, start.orders), self.task.measure),
            owners(start.orders),
            free=_may_choose(self._ticks),
            backward=self.task.backward,
            measure=self.task.measure,
            kept_bytes=kept_bytes,
            shares=shares,
        )
        solver = self.task.settings.solver(limit_s)
        status = run_solver(solver, model.model, self.task.clock)
        bound_s = solver.best_objective_bound * self._ticks.tick_s if model.is_exact else 0.0
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(None, max(bound_s, 0.0))
        return _Found(model.orders(solver), max(bound_s, 0.0))

    def _replayed(self, orders: Orders | None) -> Schedule | None:
        """Replay CP-SAT's orders in real time, whether they fit memory or not."""
        if orders is None:
            return None
        try:
            return Schedule(orders, simulate(self.pipeline, orders), "cp-sat")
        except DeadlockError:
            return None


def _better(best: Schedule, found: Schedule, measure: Measure) -> Schedule:
    """Return the one with less of the measure, with the bound that is proved."""
    if measured_s(found.timeline, measure) >= measured_s(best.timeline, measure):
        return best
    return _with_bound(found, best.lower_bound_s, measure)


def _with_bound(schedule: Schedule, bound_s: float, measure: Measure) -> Schedule:
    bound = min(max(schedule.lower_bound_s, bound_s), measured_s(schedule.timeline, measure))
    return Schedule(schedule.orders, schedule.timeline, schedule.method, bound)


def _may_choose(pipeline: PlacedPipeline) -> bool:
    replicas = sum(
        len(stage.spec.devices) for stage in pipeline.stages if len(stage.spec.devices) > 1
    )
    return 0 < 2 * replicas * pipeline.microbatches <= MAX_FREE_OPERATIONS
