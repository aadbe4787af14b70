"""Improve a schedule of given stages with CP-SAT, and bound every schedule of them."""

from __future__ import annotations

from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.schedule.heuristic import Schedule, fits_memory
from planner.schedule.measure import Measure, measured_s, timed
from planner.schedule.ticks import in_ticks
from planner.simulator import owners, simulate
from planner.solver_settings import Clock, Settings, run_solver

MAX_FREE_OPERATIONS = 80
"""Up to this many (operation, replica) pairs CP-SAT also chooses the replicas."""
MAX_OPERATIONS = 6000
"""Beyond this the model takes longer to build than it gains; the heuristic schedule stands."""


def improve_schedule(
    pipeline: PlacedPipeline,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure = "makespan",
) -> Schedule:
    """Search for a better schedule than ``start`` for the same stages on the same devices.

    Args:
        pipeline: the stages.
        start: a schedule within memory; the result is never worse. Backwards stay whole or split
            as they are in it.
        settings: of CP-SAT.
        clock: deterministic time is booked on it.
        limit_s: for this call.
        measure: what is to be small.

    Returns:
        The best schedule, with a lower bound on the measure over all schedules of these stages
        (0 if the search was restricted and proves nothing).
    """
    if len(start.timeline.operations) > MAX_OPERATIONS:
        return start
    from ortools.sat.python import cp_model

    from planner.schedule.model import ScheduleModel

    ticks = in_ticks(pipeline)
    replay = timed(simulate(ticks, start.orders), measure)
    model = ScheduleModel(
        ticks, replay, owners(start.orders), free=_may_choose(pipeline), measure=measure
    )
    solver = settings.solver(limit_s)
    status = run_solver(solver, model.model, clock)
    bound_s = solver.best_objective_bound * ticks.tick_s if model.is_exact else 0.0
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _with_bound(start, max(bound_s, 0.0), measure)
    found = _replayed(pipeline, model.orders(solver))
    least_s = measured_s(start.timeline, measure)
    better = found is not None and measured_s(found.timeline, measure) < least_s
    best = found if found is not None and better else start
    return _with_bound(best, max(bound_s, 0.0), measure)


def _replayed(pipeline: PlacedPipeline, orders: object) -> Schedule | None:
    """CP-SAT's orders in real time; None if they break memory, which the model only relaxes."""
    try:
        timeline = simulate(pipeline, orders)  # type: ignore[arg-type]
    except DeadlockError:
        return None
    if not fits_memory(timeline):
        return None
    return Schedule(orders, timeline, "cp-sat")  # type: ignore[arg-type]


def _with_bound(schedule: Schedule, bound_s: float, measure: Measure) -> Schedule:
    bound = min(max(schedule.lower_bound_s, bound_s), measured_s(schedule.timeline, measure))
    return Schedule(schedule.orders, schedule.timeline, schedule.method, bound)


def _may_choose(pipeline: PlacedPipeline) -> bool:
    replicas = sum(
        len(stage.spec.devices) for stage in pipeline.stages if len(stage.spec.devices) > 1
    )
    return 0 < 2 * replicas * pipeline.microbatches <= MAX_FREE_OPERATIONS
