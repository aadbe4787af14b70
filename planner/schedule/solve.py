"""Improve a schedule of given stages with CP-SAT, and bound every schedule of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.schedule.heuristic import Schedule
from planner.schedule.measure import Measure, measured_s, timed
from planner.schedule.shares import Shares, divides_memory, search_shares
from planner.schedule.ticks import TickPipeline, in_ticks
from planner.simulator import Orders, owners, simulate
from planner.solver_settings import Clock, Settings, run_solver

MAX_FREE_OPERATIONS = 80
"""Up to this many (operation, replica) pairs CP-SAT also chooses the replicas."""
MAX_OPERATIONS = 6000
"""Beyond this the model takes longer to build than it gains; the heuristic schedule stands."""
MOST_ROUNDS = 8
"""Of the model, with more room kept for tensors on their way from one to the next."""
SHARES_SHARE = 0.15
"""Of the time, in which memory is divided among the stages of each device."""
DIVIDED_SHARE = 0.65
"""Of the time, after which the model with divided memory gives way to the exact one."""
ROUNDING = 1 + 1e-9
SECONDS_AN_OPERATION = 2e-5
"""What an operation of a list schedule counts in deterministic time."""


def improve_schedule(
    pipeline: PlacedPipeline,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure = "makespan",
    split: bool | None = None,
) -> Schedule:
    """Search for a better schedule than ``start`` for the same stages on the same devices.

    Args:
        pipeline: the stages.
        start: a schedule within memory; the result is never worse.
        settings: of CP-SAT.
        clock: deterministic time is booked on it.
        limit_s: for this call.
        measure: what is to be small.
        split: run input and weight gradients apart unless a whole backward is quicker; else all
            backwards are whole. If not given, as in ``start``.

    Returns:
        The best schedule, with a lower bound on the measure over all schedules of these stages
        (0 if the search was restricted and proves nothing).
    """
    if len(start.timeline.operations) > MAX_OPERATIONS:
        return start
    if split is None:
        split = any(event.operation.kind == "W" for event in start.timeline.operations)
    begin_s = clock.elapsed_s
    return _Improvement(pipeline, settings, clock, limit_s, measure, split, begin_s).of(start)


@dataclass(frozen=True)
class _Found:
    """CP-SAT's orders, None if it found none, and its bound: 0 if that proves nothing."""

    orders: Orders | None
    bound_s: float


@dataclass(frozen=True)
class _Improvement:
    """What :func:`improve_schedule` was asked for."""

    pipeline: PlacedPipeline
    settings: Settings
    clock: Clock
    limit_s: float
    measure: Measure
    split: bool
    begin_s: float

    def of(self, start: Schedule) -> Schedule:
        """The best schedule found from one on."""
        if divides_memory(self.pipeline):
            start = self._within_shares(start)
            if measured_s(start.timeline, self.measure) <= start.lower_bound_s * ROUNDING:
                return start
        best, kept = start, Counter[str]()
        for number in range(MOST_ROUNDS):
            left_s = self._left_s(1.0)
            if number and left_s <= 0:
                break
            found = self._solved(start, left_s, kept_bytes=kept)
            if number == 0:
                best = _with_bound(best, found.bound_s, self.measure)
            schedule = self._replayed(found.orders)
            if schedule is None:
                break
            over = schedule.timeline.overflow_bytes
            if not over:
                return _better(best, schedule, self.measure)
            # The model leaves out tensors on their way: once more, with room kept for them.
            kept.update(over)
        return best

    def _within_shares(self, start: Schedule) -> Schedule:
        """Where devices hold several stages: with their memory divided among these."""

        def may_go_on(operations: int) -> bool:
            self.clock.spend(SECONDS_AN_OPERATION * operations)
            return self._left_s(SHARES_SHARE) > 0

        shared = search_shares(
            self.pipeline,
            split=self.split,
            measure=self.measure,
            seed=self.settings.seed,
            may_go_on=may_go_on,
        )
        if shared is None:
            return start
        start = _better(start, shared.schedule, self.measure)
        left_s = self._left_s(DIVIDED_SHARE)
        if left_s <= 0:
            return start
        found = self._solved(shared.schedule, left_s, shares=shared.shares)
        schedule = self._replayed(found.orders)
        if schedule is None or schedule.timeline.overflow_bytes:
            return start
        return _better(start, schedule, self.measure)

    def _left_s(self, share: float) -> float:
        """Of the first share of the time for this search."""
        end_s = self.begin_s + share * self.limit_s
        return min(end_s - self.clock.elapsed_s, self.clock.left_s)

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

        from planner.schedule.model import ScheduleModel

        model = ScheduleModel(
            self._ticks,
            timed(simulate(self._ticks, start.orders), self.measure),
            owners(start.orders),
            free=_may_choose(self._ticks),
            split=self.split,
            measure=self.measure,
            kept_bytes=kept_bytes,
            shares=shares,
        )
        solver = self.settings.solver(limit_s)
        status = run_solver(solver, model.model, self.clock)
        bound_s = solver.best_objective_bound * self._ticks.tick_s if model.is_exact else 0.0
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(None, max(bound_s, 0.0))
        return _Found(model.orders(solver), max(bound_s, 0.0))

    def _replayed(self, orders: Orders | None) -> Schedule | None:
        """CP-SAT's orders in real time, whether they fit memory or not."""
        if orders is None:
            return None
        try:
            return Schedule(orders, simulate(self.pipeline, orders), "cp-sat")
        except DeadlockError:
            return None


def _better(best: Schedule, found: Schedule, measure: Measure) -> Schedule:
    """The one with less of the measure, with the bound that is proved."""
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
