"""The best schedule of given stages, and a bound on all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from planner.artifacts.plan import Stage
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import InfeasibleError, PipeplanError, shorten
from planner.schedule.heuristic import (
    Schedule,
    best_heuristic_schedule,
    fits_memory,
    quick_schedules,
)
from planner.schedule.measure import Measure, measure_bound_s, measured_s
from planner.schedule.solve import MAX_OPERATIONS, improve_schedule
from planner.schedule.stretch import shortened, stretched
from planner.solver_settings import DEFAULT_WORKERS, Clock, Settings

PROVED = 1e-9
"""A gap no larger is rounding."""
SHORT_SHARE = 0.5
"""Of the time left, for a schedule of few microbatches where there are many."""
SECONDS_AN_OPERATION = 2e-5
"""What scheduling an operation counts in deterministic time."""


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
        split: run input and weight gradients apart, or whole where that is measured to be quicker
            and turns out better; else all backwards are whole.
        measure: what is to be small: ``makespan``, the time of an iteration, or
            ``longest_stage_span``, the zero-bubble paper's objective.
        time_limit_s: stop after this long; CP-SAT's own seconds in deterministic mode.
        seed: of CP-SAT's searches.
        workers: threads of the solver.
        deterministic: the same schedule on every machine.

    Returns:
        The best schedule found; its ``lower_bound_s`` holds for every schedule of these stages
        whose backwards may be split, or are all whole, as asked.

    Raises:
        InfeasibleError: if no schedule was found that fits memory.
        PipeplanError: if two devices that must exchange data have no path of links, or there is no
            such measure.
    """
    if measure not in get_args(Measure):
        raise PipeplanError(
            f"measure: {shorten(measure)} is not one of {', '.join(get_args(Measure))}"
        )
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
    bound_s = measure_bound_s(pipeline, measure, split=split)
    best = _best_quick(pipeline, clock, bound_s, split, measure)
    best_s = measured_s(best.timeline, measure)
    best = replace(best, lower_bound_s=min(best_s, bound_s))
    if best_s <= bound_s * (1 + PROVED) or clock.left_s <= 0:
        return best
    if len(best.timeline.operations) > MAX_OPERATIONS:
        return _stretched(pipeline, best, settings, clock, split, measure)
    return improve_schedule(pipeline, best, settings, clock, clock.left_s, measure, split)


def _stretched(
    pipeline: PlacedPipeline,
    best: Schedule,
    settings: Settings,
    clock: Clock,
    split: bool,
    measure: Measure,
) -> Schedule:
    """Many microbatches: from a searched schedule of few, if that is better."""
    short = shortened(pipeline)
    if short is None or 3 * len(short.stages) * short.microbatches > MAX_OPERATIONS:
        return best
    part = Clock(SHORT_SHARE * clock.left_s, settings.deterministic)
    try:
        found = schedule_pipeline(short, settings, part, split, measure)
    except InfeasibleError:
        return best
    finally:
        clock.spend(part.elapsed_s)
    best_s = measured_s(best.timeline, measure)
    for schedule in stretched(pipeline, found):
        clock.spend(SECONDS_AN_OPERATION * len(schedule.timeline.operations))
        found_s = measured_s(schedule.timeline, measure)
        if found_s < best_s and fits_memory(schedule.timeline):
            best, best_s = replace(schedule, lower_bound_s=best.lower_bound_s), found_s
        if clock.left_s <= 0:
            break
    return replace(best, lower_bound_s=min(best.lower_bound_s, best_s))


def _best_quick(
    pipeline: PlacedPipeline, clock: Clock, bound_s: float, split: bool, measure: Measure
) -> Schedule:
    """The best that needs no search, while there is time and none is proved to be the best."""
    best, best_s = None, math.inf
    for schedule in quick_schedules(pipeline, split=split):
        clock.spend(SECONDS_AN_OPERATION * len(schedule.timeline.operations))
        found_s = measured_s(schedule.timeline, measure)
        if found_s < best_s and fits_memory(schedule.timeline):
            best, best_s = schedule, found_s
        if best is not None and (clock.left_s <= 0 or best_s <= bound_s * (1 + PROVED)):
            return best
    best = best or best_heuristic_schedule(pipeline, split=split, measure=measure)
    if best is None:
        raise InfeasibleError("no schedule of these stages was found that fits memory")
    return best
