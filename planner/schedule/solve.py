"""Improve a schedule of given stages with CP-SAT, and bound every schedule of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.schedule.heuristic import Schedule
from planner.schedule.measure import Measure, measured_s, timed
from planner.schedule.shares import Shares, divides_memory, search_shares
from planner.schedule.ticks import TickPipeline, in_ticks
from planner.simulator import Orders, Timeline, owners, simulate
from planner.solver_settings import Clock, Settings, run_solver

MAX_FREE_OPERATIONS = 80
"""Up to this many (operation, replica) pairs CP-SAT also chooses the replicas."""
MAX_OPERATIONS = 6000
"""Beyond this the model takes longer to build than it gains; the heuristic schedule stands."""
MOST_ROUNDS = 8
"""Of the model, with more room kept for tensors on their way from one to the next."""
SHARES_SHARE = 0.15
"""Of the time, in which memory is divided among the stages of each device."""
DIVIDED_SHARE = 0.5
"""Of the time, for the model with divided memory."""
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
    end_s = clock.elapsed_s + limit_s
    if split is None:
        split = any(event.operation.kind == "W" for event in start.timeline.operations)
    if divides_memory(pipeline):
        start = _improved_within_shares(pipeline, start, settings, clock, limit_s, measure, split)
    ticks, best = in_ticks(pipeline), start
    replay = timed(simulate(ticks, start.orders), measure)
    kept: Counter[str] = Counter()
    for number in range(MOST_ROUNDS):
        left_s = min(end_s - clock.elapsed_s, clock.left_s)
        if number and left_s <= 0:
            break
        found = _solved(ticks, replay, start, settings, clock, left_s, measure, split, kept)
        if number == 0:
            best = _with_bound(best, found.bound_s, measure)
        schedule = _replayed(pipeline, found.orders)
        if schedule is None:
            break
        over = _overflow_bytes(schedule.timeline)
        if not over:
            return _better(best, schedule, measure)
        # The model leaves out tensors on their way: once more, with room kept for them.
        kept.update(over)
    return best


def _improved_within_shares(
    pipeline: PlacedPipeline,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure,
    split: bool,
) -> Schedule:
    """Where devices hold several stages: first with their memory divided among these."""
    begin_s = clock.elapsed_s

    def may_go_on(operations: int) -> bool:
        clock.spend(SECONDS_AN_OPERATION * operations)
        return clock.left_s > 0 and clock.elapsed_s - begin_s < SHARES_SHARE * limit_s

    shared = search_shares(
        pipeline, split=split, measure=measure, seed=settings.seed, may_go_on=may_go_on
    )
    if shared is None:
        return start
    start = _better(start, shared.schedule, measure)
    ticks = in_ticks(pipeline)
    replay = timed(simulate(ticks, shared.schedule.orders), measure)
    left_s = min(DIVIDED_SHARE * limit_s, clock.left_s)
    if left_s <= 0:
        return start
    found = _solved(
        ticks, replay, shared.schedule, settings, clock, left_s, measure, split, {}, shared.shares
    )
    schedule = _replayed(pipeline, found.orders)
    if schedule is None or _overflow_bytes(schedule.timeline):
        return start
    return _better(start, schedule, measure)


@dataclass(frozen=True)
class _Found:
    """CP-SAT's orders, None if it found none, and its bound: 0 if that proves nothing."""

    orders: Orders | None
    bound_s: float


def _solved(
    ticks: TickPipeline,
    replay: Timeline,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure,
    split: bool,
    kept_bytes: Mapping[str, int],
    shares: Shares | None = None,
) -> _Found:
    from ortools.sat.python import cp_model

    from planner.schedule.model import ScheduleModel

    model = ScheduleModel(
        ticks,
        replay,
        owners(start.orders),
        free=_may_choose(ticks),
        split=split,
        measure=measure,
        kept_bytes=kept_bytes,
        shares=shares,
    )
    solver = settings.solver(limit_s)
    status = run_solver(solver, model.model, clock)
    bound_s = solver.best_objective_bound * ticks.tick_s if model.is_exact else 0.0
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _Found(None, max(bound_s, 0.0))
    return _Found(model.orders(solver), max(bound_s, 0.0))


def _replayed(pipeline: PlacedPipeline, orders: Orders | None) -> Schedule | None:
    """CP-SAT's orders in real time, whether they fit memory or not."""
    if orders is None:
        return None
    try:
        return Schedule(orders, simulate(pipeline, orders), "cp-sat")
    except DeadlockError:
        return None


def _overflow_bytes(timeline: Timeline) -> dict[str, int]:
    """By device, how much its peak is beyond its capacity."""
    over = {
        device: peak - timeline.pipeline.capacity_bytes(device)
        for device, peak in timeline.peak_memory_bytes.items()
    }
    return {device: bytes_ for device, bytes_ in over.items() if bytes_ > 0}


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
