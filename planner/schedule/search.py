"""The best schedule of given stages, and a bound on all of them."""

from __future__ import annotations

from collections.abc import Iterable

from planner.artifacts.plan import Stage
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import InfeasibleError, PipeplanError
from planner.schedule.heuristic import Schedule, best_heuristic_schedule
from planner.schedule.measure import Measure, measure_bound_s, measured_s
from planner.schedule.solve import improve_schedule
from planner.solver_settings import DEFAULT_WORKERS, Clock, Settings

PROVED = 1e-9
"""A gap no larger is rounding."""


def search_schedule(
    problem: Problem,
    stages: Iterable[Stage | StageSpec],
    *,
    split: bool = False,
    measure: Measure = "makespan",
    time_limit_s: float = 30.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
) -> Schedule:
    """Find the fastest microbatch schedule of given stages on given devices.

    Args:
        problem: the model, cluster and job.
        stages: in pipeline order, such as a plan's; every layer in one, no edge backwards.
        split: run input and weight gradients apart.
        measure: what is to be small.
        time_limit_s: stop after this long; CP-SAT's own seconds in deterministic mode.
        seed: of CP-SAT's searches.
        workers: threads of the solver.
        deterministic: the same schedule on every machine.

    Returns:
        The best schedule found; its ``lower_bound_s`` holds for every schedule of these stages
        whose backwards are all split or all whole, as asked.

    Raises:
        InfeasibleError: if no schedule was found that fits memory.
        PipeplanError: if two devices that must exchange data have no path of links.
    """
    specs = [StageSpec(stage.layers, stage.devices, stage.recompute) for stage in stages]
    pipeline = place(problem, specs)
    if not is_connected(pipeline):
        raise PipeplanError("stages: two devices that must exchange data have no path of links")
    settings = Settings(seed, workers, deterministic)
    return schedule_pipeline(pipeline, settings, Clock(time_limit_s, deterministic), split, measure)


def schedule_pipeline(
    pipeline: PlacedPipeline,
    settings: Settings,
    clock: Clock,
    split: bool = False,
    measure: Measure = "makespan",
) -> Schedule:
    """As :func:`search_schedule`, for stages that are placed already."""
    best = best_heuristic_schedule(pipeline, split=split, measure=measure)
    if best is None:
        raise InfeasibleError("no schedule of these stages was found that fits memory")
    best_s = measured_s(best.timeline, measure)
    bound_s = min(best_s, measure_bound_s(pipeline, measure, split=split))
    best = Schedule(best.orders, best.timeline, best.method, bound_s)
    if best_s <= bound_s * (1 + PROVED) or clock.left_s <= 0:
        return best
    return improve_schedule(pipeline, best, settings, clock, clock.left_s, measure)
