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

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.errors import InfeasibleError, PipeplanError, shorten
from planner.plan.plan import Stage
from planner.plan.problem import Problem
from planner.search.budget import Clock, SearchWork, Settings
from planner.search.schedule.equal_pipelines import pipelines_of
from planner.search.schedule.heuristic import (
    Schedule,
    best_heuristic_schedule,
    carried_over,
    fits_memory,
    quick_schedules,
)
from planner.search.schedule.measure import Measure, measure_bound_s
from planner.search.schedule.periodic import periodic_schedules, with_few_microbatches
from planner.search.schedule.pipeline_groups import PipelineGroups, groups_of
from planner.search.schedule.solve import MAX_OPERATIONS, ScheduleTask, improve_schedule
from planner.search.settings import DEFAULT_WORKERS

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
            ``longest_stage_span``, the zero-bubble paper's objective, which is timed on links
            that serve messages in turn: they are moved to later times one by one.
        time_limit_s: stop after this long; CP-SAT's own seconds in deterministic mode.
        seed: of CP-SAT's searches.
        workers: threads of the solver.
        deterministic: the same schedule on every machine.

    Returns:
        The best schedule found; its ``lower_bound_s`` holds for every schedule of these stages
        whose backwards may be split, or are all whole, as asked.

    Raises:
        InfeasibleError: if no schedule was found that fits memory.
        PipeplanError: if two devices that must exchange data have no path of links, there is no
            such measure, or the runtime has no such spans.
    """
    if measure not in get_args(Measure):
        raise PipeplanError(
            f"measure: {shorten(measure)} is not one of {', '.join(get_args(Measure))}"
        )
    if measure == "longest_stage_span":
        rules = problem.runtime.model_copy(update={"links": "in_turn"})
        problem = replace(problem, runtime=rules)
    if any(stage.offload for stage in stages):
        raise PipeplanError(
            "stages.offload: schedules of stages that offload are not searched; keep their stashes"
        )
    if split and problem.job.shards_parameters:
        raise PipeplanError(
            "split: job.shard_parameters is true, and replicas that divide weights run whole "
            "backwards; leave it out, or plan with shard_parameters = false"
        )
    specs = [StageSpec(stage.layers, stage.devices, stage.recompute) for stage in stages]
    pipeline = place(problem, specs)
    if not is_connected(pipeline):
        raise PipeplanError("stages: two devices that must exchange data have no path of links")
    if measure == "longest_stage_span" and pipeline.behaviour.blocks:
        raise PipeplanError(
            f"measure: {measure} is of iterations that overlap, but the messages of "
            f"{problem.runtime.name} block; choose makespan, or another runtime"
        )
    settings, clock = Settings(seed, workers, deterministic), Clock(time_limit_s, deterministic)
    task = ScheduleTask(settings, clock, measure, "any" if split else "whole")
    return schedule_pipeline(pipeline, task)


def schedule_pipeline(pipeline: PlacedPipeline, task: ScheduleTask) -> Schedule:
    """Find a schedule as :func:`search_schedule` does, for stages that are placed already.

    Args:
        pipeline: the stages.
        task: the means and the aim, with the clock of the time limit.
    """
    bound_s = measure_bound_s(pipeline, task.measure, split=task.backward != "whole")
    best = _best_quick(pipeline, task, bound_s)
    best = replace(best, lower_bound_s=min(task.measured_s(best), bound_s))
    has_other_orders = pipeline.problem.job.order == "any"
    if _is_proved(best, task, bound_s) or task.clock.left_s <= 0 or not has_other_orders:
        return best
    return improve_any(pipeline, best, task, task.clock.left_s)


def improve_any(
    pipeline: PlacedPipeline, start: Schedule, task: ScheduleTask, limit_s: float
) -> Schedule:
    """Search for a better schedule of any number of operations, as :func:`improve_schedule` does.

    Args:
        pipeline: the stages.
        start: a schedule within memory; the result is never worse.
        task: the means and the aim.
        limit_s: for this call.
    """
    job, clock = pipeline.problem.job, task.clock
    if job.order == "1f1b":
        return start
    end_s = clock.elapsed_s + limit_s
    if job.has_pipelines and pipeline.has_replicas:
        pipelines = pipelines_of(pipeline)
        # Other schedules know nothing of the orders that such a job asks for.
        return start if pipelines is None else _improved(pipeline, pipelines, start, task, limit_s)
    many = len(start.timeline.operations) > MAX_OPERATIONS
    groups = groups_of(pipeline)
    if groups is not None and groups.are_apart:
        group_s = limit_s if many else GROUP_SHARE * limit_s
        start = _improved(pipeline, groups, start, task, group_s)
    left_s = min(end_s - clock.elapsed_s, clock.left_s)
    if left_s <= 0:
        return start
    improve = _periodic if many else improve_schedule
    return improve(pipeline, start, task, left_s)


def _improved(
    pipeline: PlacedPipeline,
    groups: PipelineGroups,
    start: Schedule,
    task: ScheduleTask,
    limit_s: float,
) -> Schedule:
    """Improve the best quick schedule of one of equal groups; carry it over if that is better.

    What is proved holds for schedules of equal groups alone, so it bounds nothing.
    """
    one = groups.first_of(pipeline)
    quick = best_heuristic_schedule(one, backward=task.backward, measure=task.measure)
    if quick is None:
        return start
    found = improve_any(one, quick, task, limit_s)
    carried = next(carried_over(pipeline, groups, [found]), None)
    if carried is None:
        return start
    task.clock.charge(SearchWork.SIMULATED_OPERATION, len(carried.timeline.operations))
    if task.measured_s(carried) >= task.measured_s(start) or not fits_memory(carried.timeline):
        return start
    return replace(carried, lower_bound_s=start.lower_bound_s)


def _periodic(
    pipeline: PlacedPipeline, best: Schedule, task: ScheduleTask, limit_s: float
) -> Schedule:
    """Repeat the core of a schedule of few microbatches, if that is better."""
    short, clock = with_few_microbatches(pipeline), task.clock
    if short is None or 3 * len(short.stages) * short.microbatches > MAX_OPERATIONS:
        return best
    end_s = clock.elapsed_s + limit_s
    part = Clock(SHORT_SHARE * limit_s, task.settings.deterministic)
    try:
        found = schedule_pipeline(short, replace(task, clock=part))
    except InfeasibleError:
        return best
    finally:
        clock.spend(part.elapsed_s)
    for schedule in periodic_schedules(pipeline, found):
        clock.charge(SearchWork.SIMULATED_OPERATION, len(schedule.timeline.operations))
        is_better = task.measured_s(schedule) < task.measured_s(best)
        if is_better and fits_memory(schedule.timeline):
            best = replace(schedule, lower_bound_s=best.lower_bound_s)
        if clock.elapsed_s >= end_s or clock.left_s <= 0:
            break
    return replace(best, lower_bound_s=min(best.lower_bound_s, task.measured_s(best)))


def _is_proved(schedule: Schedule, task: ScheduleTask, bound_s: float) -> bool:
    return task.measured_s(schedule) <= bound_s * (1 + PROVED)


def _best_quick(pipeline: PlacedPipeline, task: ScheduleTask, bound_s: float) -> Schedule:
    """Return the best schedule without search, while there is time and none is proved best."""
    best, best_s = None, math.inf
    for schedule in quick_schedules(pipeline, backward=task.backward):
        task.clock.charge(SearchWork.SIMULATED_OPERATION, len(schedule.timeline.operations))
        found_s = task.measured_s(schedule)
        if found_s < best_s and fits_memory(schedule.timeline):
            best, best_s = schedule, found_s
        if best is not None and (task.clock.left_s <= 0 or _is_proved(best, task, bound_s)):
            return best
    if best is None:
        best = best_heuristic_schedule(pipeline, backward=task.backward, measure=task.measure)
    if best is None:
        raise InfeasibleError("no schedule of these stages was found that fits memory")
    return best
