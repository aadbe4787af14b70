"""The best schedule of given stages, and a bound on all of them.

Where there are too many operations for CP-SAT, a schedule of a few microbatches is searched well
and repeated (:mod:`planner.search.schedule.periodic`). Where the devices are several equal
pipelines, the schedule of one is improved first and carried over to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import InfeasibleError, PipeplanError, shorten
from planner.plan.plan import Stage
from planner.plan.problem import Problem
from planner.search.budget import DEFAULT_WORKERS, Clock, SearchWork, Settings
from planner.search.schedule.heuristic import (
    Schedule,
    best_heuristic_schedule,
    carried_over,
    fits_memory,
    quick_schedules,
)
from planner.search.schedule.measure import Measure, measure_bound_s, measured_s
from planner.search.schedule.periodic import periodic_schedules, with_few_microbatches
from planner.search.schedule.pipeline_groups import PipelineGroups, pipeline_groups
from planner.search.schedule.solve import MAX_OPERATIONS, improve_schedule
from planner.space import Backward

PROVED = 1e-9
"""A gap no larger is rounding."""
SHORT_SHARE = 0.5
"""Share of the time for a schedule of few microbatches where there are many."""
GROUP_SHARE = 0.3
"""Share of the time for one of several equal groups before all are improved together."""


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
        split: let backwards run as input and weight gradients, or whole where that turns out
            better; else all backwards are whole.
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
    clock = Clock(time_limit_s, deterministic)
    return schedule_pipeline(pipeline, settings, clock, "any" if split else "whole", measure)


def schedule_pipeline(
    pipeline: PlacedPipeline,
    settings: Settings,
    clock: Clock,
    backward: Backward = "whole",
    measure: Measure = "makespan",
) -> Schedule:
    """Find a schedule as :func:`search_schedule` does, for stages that are placed already.

    Args:
        pipeline: the stages.
        settings: of CP-SAT.
        clock: of the time limit.
        backward: kinds of backward that the schedule may have.
        measure: what is to be small.
    """
    bound_s = measure_bound_s(pipeline, measure, split=backward != "whole")
    best = _best_quick(pipeline, clock, bound_s, backward, measure)
    best_s = measured_s(best.timeline, measure)
    best = replace(best, lower_bound_s=min(best_s, bound_s))
    has_other_orders = pipeline.problem.job.order == "any"
    if best_s <= bound_s * (1 + PROVED) or clock.left_s <= 0 or not has_other_orders:
        return best
    return improve_any(pipeline, best, settings, clock, clock.left_s, measure, backward)


def improve_any(
    pipeline: PlacedPipeline,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure = "makespan",
    backward: Backward = "whole",
) -> Schedule:
    """Search for a better schedule of any number of operations, as :func:`improve_schedule` does.

    Args:
        pipeline: the stages.
        start: a schedule within memory; the result is never worse.
        settings: of CP-SAT.
        clock: deterministic time is booked on it.
        limit_s: for this call.
        measure: what is to be small.
        backward: kinds of backward that the result may have.
    """
    job = pipeline.problem.job
    if job.order == "1f1b" or (job.has_pipelines and pipeline.has_replicas):
        # Groups and periodic schedules know nothing of the orders that such a job asks for.
        return improve_schedule(pipeline, start, settings, clock, limit_s, measure, backward)
    end_s = clock.elapsed_s + limit_s
    many = len(start.timeline.operations) > MAX_OPERATIONS
    groups = pipeline_groups(pipeline)
    if groups is not None and groups.are_apart:
        group_s = limit_s if many else GROUP_SHARE * limit_s
        start = _improved_group(groups, start, settings, clock, group_s, measure, backward)
    left_s = min(end_s - clock.elapsed_s, clock.left_s)
    if left_s <= 0:
        return start
    if many:
        return _periodic(pipeline, start, settings, clock, left_s, measure, backward)
    return improve_schedule(pipeline, start, settings, clock, left_s, measure, backward)


def _improved_group(
    groups: PipelineGroups,
    start: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure,
    backward: Backward,
) -> Schedule:
    """Improve the best quick schedule of the first group and carry it over, if that is better.

    What is proved holds for schedules of equal groups alone, so it bounds nothing.
    """
    quick = best_heuristic_schedule(groups.first, backward=backward, measure=measure)
    if quick is None:
        return start
    found = improve_any(groups.first, quick, settings, clock, limit_s, measure, backward)
    carried = carried_over(found, groups)
    clock.charge(SearchWork.SIMULATED_OPERATION, len(carried.timeline.operations))
    found_s, start_s = (measured_s(s.timeline, measure) for s in (carried, start))
    if found_s >= start_s or not fits_memory(carried.timeline):
        return start
    return replace(carried, lower_bound_s=start.lower_bound_s)


def _periodic(
    pipeline: PlacedPipeline,
    best: Schedule,
    settings: Settings,
    clock: Clock,
    limit_s: float,
    measure: Measure,
    backward: Backward,
) -> Schedule:
    """Repeat the core of a schedule of few microbatches, if that is better."""
    short = with_few_microbatches(pipeline)
    if short is None or 3 * len(short.stages) * short.microbatches > MAX_OPERATIONS:
        return best
    end_s = clock.elapsed_s + limit_s
    part = Clock(SHORT_SHARE * limit_s, settings.deterministic)
    try:
        found = schedule_pipeline(short, settings, part, backward, measure)
    except InfeasibleError:
        return best
    finally:
        clock.spend(part.elapsed_s)
    best_s = measured_s(best.timeline, measure)
    for schedule in periodic_schedules(pipeline, found):
        clock.charge(SearchWork.SIMULATED_OPERATION, len(schedule.timeline.operations))
        found_s = measured_s(schedule.timeline, measure)
        if found_s < best_s and fits_memory(schedule.timeline):
            best, best_s = replace(schedule, lower_bound_s=best.lower_bound_s), found_s
        if clock.elapsed_s >= end_s or clock.left_s <= 0:
            break
    return replace(best, lower_bound_s=min(best.lower_bound_s, best_s))


def _best_quick(
    pipeline: PlacedPipeline, clock: Clock, bound_s: float, backward: Backward, measure: Measure
) -> Schedule:
    """Return the best schedule without search, while there is time and none is proved best."""
    best, best_s = None, math.inf
    for schedule in quick_schedules(pipeline, backward=backward):
        clock.charge(SearchWork.SIMULATED_OPERATION, len(schedule.timeline.operations))
        found_s = measured_s(schedule.timeline, measure)
        if found_s < best_s and fits_memory(schedule.timeline):
            best, best_s = schedule, found_s
        if best is not None and (clock.left_s <= 0 or best_s <= bound_s * (1 + PROVED)):
            return best
    if best is None:
        best = best_heuristic_schedule(pipeline, backward=backward, measure=measure)
    if best is None:
        raise InfeasibleError("no schedule of these stages was found that fits memory")
    return best
