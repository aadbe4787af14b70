"""Simple plans: of those about as fast as the fastest one found, the simplest.

Besides what the search found there are simple neighbours of its fastest plans: the same stages in
published schedules and with their boundaries at the ends of blocks, and the plans of a search for
equal pipelines that cuts the model nowhere else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from planner.cluster.cluster import node_of
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.placement import place
from planner.model.blocks import block_name
from planner.search.budget import SearchWork
from planner.search.group_search import searched_apart
from planner.search.near import SHARE, ChosenSchedule, candidates_near, end_of_choice_s, key_of
from planner.search.partition.chain import Partition
from planner.search.recomputed import RecomputedSchedules
from planner.search.result import Complexity, Simplicity
from planner.search.schedule.heuristic import HasTime, Schedule, fits_memory, quick_schedules
from planner.search.schedule.pipeline_groups import operation_count
from planner.search.state import Candidate, Search, SearchTask
from planner.space import Backward
from planner.variants.problems import with_job

WITHIN = 0.01
"""A simple plan takes at most this share longer than the fastest found, unless told otherwise."""
NEIGHBOUR_SHARE = 0.5
"""Share of the time of the choice for the search for simple neighbours."""
BEST = 3
"""Partitions of that search that are scheduled, of each largest number of stages."""
MOST_PARTITIONS = 32
"""Partitions that are scheduled by published rules."""


def choose_simple(
    search: Search, within: float, run: Callable[[Search], None]
) -> ChosenSchedule | None:
    """Return the simplest plan that takes at most a share longer than the fastest one.

    Of equally simple plans it is the fastest. Deterministic in deterministic mode. The stages of
    the fastest plan are scheduled by published rules whatever time is left.

    Args:
        search: that is over; simple plans that it finds now may be the fastest.
        within: the share.
        run: the steps of a quick search, which looks for simple neighbours.

    Returns:
        None if the search was interrupted or found nothing.
    """
    if search.best is None or search.clock.is_stopped:
        return None
    stop_s = search.clock.elapsed_s + SHARE * end_of_choice_s(search)
    _try_neighbours(search, search.best, within, stop_s, run)
    best_s = search.best_s
    found = list(_contenders(search, search.best, (1 + within) * best_s, stop_s))
    fastest = min((row for row in found if row[1].iteration_time_s <= best_s), key=_rank)
    complexity, schedule = min(found, key=_rank)
    time_s = schedule.iteration_time_s
    simplicity = Simplicity(
        within, complexity, time_s, schedule.method, fastest[0], best_s, len(found)
    )
    return ChosenSchedule(schedule, simplicity)


def _rank(row: tuple[Complexity, Schedule]) -> tuple[Complexity, float]:
    complexity, schedule = row
    return complexity, schedule.iteration_time_s


def _contenders(
    search: Search, best: Candidate, longest_s: float, stop_s: float
) -> Iterator[tuple[Complexity, Schedule]]:
    """Yield schedules that are fast enough, with their complexity, each once."""
    published = RecomputedSchedules(search.chain, published_schedule)
    near = candidates_near(search, best, longest_s)
    near[1:] = sorted(near[1:], key=lambda c: complexity_of(c.schedule, is_published=True))
    for number, candidate in enumerate(near[:MOST_PARTITIONS]):
        if number > 0 and search.clock.elapsed_s + search.longest_s >= stop_s:
            break
        pipeline = place(search.problem, search.chain.specs(candidate.partition))
        search.clock.charge(SearchWork.SCHEDULED_OPERATION, operation_count(pipeline))
        by_rule = published.best(candidate.partition, pipeline)
        if by_rule is not None and search.task.allows_orders(by_rule):
            if by_rule.iteration_time_s <= longest_s:
                yield complexity_of(by_rule, is_published=True), by_rule
            if key_of(by_rule) == key_of(candidate.schedule):
                continue
        yield complexity_of(candidate.schedule, is_published=False), candidate.schedule


def published_schedule(
    pipeline: PlacedPipeline, *, backward: Backward, has_time: HasTime
) -> Schedule | None:
    """Return the fastest published schedule within memory; None if none fits or none applies."""
    schedules = quick_schedules(pipeline, backward=backward, listed=False, has_time=has_time)
    fit = (schedule for schedule in schedules if fits_memory(schedule.timeline))
    return min(fit, key=lambda schedule: schedule.iteration_time_s, default=None)


# --- simple neighbours ----------------------------------------------------------------------------


def _try_neighbours(
    search: Search, best: Candidate, within: float, stop_s: float, run: Callable[[Search], None]
) -> None:
    """Schedule simple partitions that may be within the share of the best.

    Of the fewest stages first, until some are.
    """
    near = candidates_near(search, best, (1 + within) * search.best_s)
    fewest = min(len(candidate.partition) for candidate in near)
    task = _simple_task(search, len(best.partition))
    at_blocks = (task.chain.at_cuts(candidate.partition) for candidate in near[:MOST_PARTITIONS])
    _consider(search, filter(None, at_blocks), within, stop_s)
    for most in range(search.problem.job.min_stages, fewest + 1):
        left_s = stop_s - search.clock.elapsed_s
        if left_s <= 0 or search.clock.is_stopped:
            return
        limit_s = NEIGHBOUR_SHARE * left_s / (fewest + 1 - most)
        found = searched_apart(search, _simple_task(search, most), limit_s, run)
        if _consider(search, found[:BEST], within, stop_s):
            return


def _consider(
    search: Search, partitions: Iterable[Partition], within: float, stop_s: float
) -> bool:
    """Schedule partitions that may be within the share of the best; return whether one is."""
    times_s = []
    for partition in dict.fromkeys(partitions):
        if search.clock.is_stopped or search.clock.elapsed_s + search.longest_s >= stop_s:
            break
        is_far = search.proved_s(partition) > (1 + within) * search.best_s
        candidate = None if is_far else search.consider(partition)
        times_s += [candidate.schedule.iteration_time_s] if candidate is not None else []
    return min(times_s, default=math.inf) <= (1 + within) * search.best_s


def _simple_task(search: Search, most_stages: int) -> SearchTask:
    """Return the task of finding plans with the freedoms of simple ones alone.

    They are equal pipelines of so many stages at most, divided between blocks.
    """
    layers, job = search.chain.names, search.problem.job
    allowed = (layers[position] for position in search.chain.cuts[1:-1])
    inside = {after for before, after in pairwise(layers) if _is_same_block(before, after)}
    problem = with_job(
        search.problem,
        cuts=tuple(layer for layer in allowed if layer not in inside),
        max_stages=most_stages,
        max_stages_per_device=1,
        equal_pipelines=job.replication,
    )
    return replace(search.task, problem=problem, constrain=None)


def _is_same_block(layer: str, other: str) -> bool:
    block = block_name(layer)
    return block is not None and block == block_name(other)


# --- how complex a plan is ------------------------------------------------------------------------


def complexity_of(schedule: Schedule, *, is_published: bool) -> Complexity:
    """Return how complex a plan with this schedule would be."""
    pipeline = schedule.timeline.pipeline
    stages = pipeline.stages
    runs = Counter(
        (operation.stage, device)
        for device, order in schedule.orders.items()
        for operation in order
        if operation.kind == "F"
    )
    usual = Counter(len(stage.spec.devices) for stage in stages).most_common(1)[0][0]
    uneven = (
        len(stage.spec.devices) != usual
        or len({pipeline.problem.cluster.type_of(device) for device in stage.spec.devices}) > 1
        or len({runs[number, device] for device in stage.spec.devices}) > 1
        for number, stage in enumerate(stages)
    )
    return Complexity(
        unaligned_stages=sum(map(_is_unaligned, stages)),
        stages=len(stages),
        uneven_stages=sum(uneven),
        divided_blocks=_divided_blocks(stages),
        searched_orders=0 if is_published else 1,
    )


def _is_unaligned(stage: PlacedStage) -> bool:
    """Return whether a stage has more devices on one of its nodes than on another."""
    return len(set(Counter(map(node_of, stage.spec.devices)).values())) > 1


def _divided_blocks(stages: tuple[PlacedStage, ...]) -> int:
    held = [{block for block in map(block_name, stage.spec.layers) if block} for stage in stages]
    return sum(count > 1 for count in Counter(block for row in held for block in row).values())
