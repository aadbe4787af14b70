"""First plans: warm starts, the classic planners' and the partition optimiser's partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from planner.costs.placement import PlacedPipeline, is_connected, place
from planner.feasibility import MOST_LAYERS
from planner.partition.bounds.work import longest_plan_s, work_bound_s
from planner.partition.candidates import simple_partitions, thorough_partitions
from planner.partition.chain import Partition
from planner.partition.memory.division import Division
from planner.partition.planners import classic_partitions
from planner.portfolio.exact import model_applies, partition_search
from planner.portfolio.search import Search

SECONDS_A_STAGE = 1e-4
"""What placing a stage counts in deterministic time."""
FIRST_SHARE = 0.15
STEP_SHARES = (0.3, 0.5)
SEARCH_SHARE = 0.3
"""Of the whole time, by which simple partitions, two steps and the search give way to the next."""
PROMISING = 16
"""Partitions of the optimiser that are scheduled in any case, besides one a stage count."""


def schedule_warm_starts(search: Search, partitions: Iterable[Partition]) -> None:
    """Schedule the partitions the user brought, whatever time it takes."""
    for partition in partitions:
        search.optimiser.offer(partition)
        search.consider(partition)


def optimise_partitions(search: Search) -> None:
    """Partitions with the least bound, and a bound on all; the most promising are scheduled."""
    search.raise_bound(work_bound_s(search.chain), "total work")
    optimiser = search.optimiser
    simple = simple_partitions(search.chain, search.max_stages)
    _offer(search, simple, _until(search, FIRST_SHARE))
    _schedule_best(search, optimiser.promising(1)[:1])
    # On large clusters the classic planners take longer than the first good partitions.
    steps = [_offer_classics, _start] if not optimiser.is_large else [_start, _offer_classics]
    for step, share in zip(steps, STEP_SHARES, strict=True):
        step(search, _until(search, share))
    optimiser.search(_until(search, SEARCH_SHARE), search.gap_limit)
    _schedule_best(search, optimiser.promising(PROMISING))


def _until(search: Search, share: float) -> Callable[[], bool]:
    """Whether less than this share of the whole time is spent."""
    end_s = share * search.limit_s
    return lambda: search.clock.elapsed_s < end_s and search.clock.left_s > 0


def _offer_classics(search: Search, may_go_on: Callable[[], bool]) -> None:
    _offer(search, classic_partitions(search.chain, search.max_stages), may_go_on)


def _offer(search: Search, partitions: Iterable[Partition], may_go_on: Callable[[], bool]) -> None:
    """To the optimiser, while there is time or none of them will do."""
    for partition in partitions:
        search.optimiser.offer(partition)
        if search.optimiser.best is not None and not may_go_on():
            return


def _start(search: Search, may_go_on: Callable[[], bool]) -> None:
    optimiser = search.optimiser
    optimiser.start(may_go_on)
    _schedule_best(search, optimiser.promising(1)[:1])
    if search.clock.left_s > 0:
        optimiser.relax(lambda: search.clock.left_s > 0)
        search.raise_single_bound(optimiser.bound_s, "relaxed cluster")


def schedule_thorough(search: Search, share: float = 0.2) -> None:
    """Balanced partitions for every number of stages, and several stages a device."""
    stop_s = (1 - share) * search.clock.left_s
    found = []
    for partition in thorough_partitions(search.chain, search.max_stages):
        found.append(partition)
        if search.clock.left_s < stop_s or search.is_done():
            break
    _schedule_best(search, found)


def _schedule_best(search: Search, partitions: Sequence[Partition]) -> None:
    """In order of what they promise, while one may beat the incumbent."""
    pool = []
    for partition in dict.fromkeys(map(search.optimiser.representative, partitions)):
        if not search.has_time:
            break
        promise_s, pipeline = _promise(search, partition)
        if math.isfinite(promise_s):
            pool.append((promise_s, partition, pipeline))
    for promise_s, partition, pipeline in sorted(pool, key=lambda row: row[0]):
        if promise_s >= search.best_s or (search.best is not None and search.is_done()):
            return
        if not search.has_time:
            return
        if partition not in search.candidates:
            search.schedule(partition, pipeline)


def _promise(search: Search, partition: Partition) -> tuple[float, PlacedPipeline]:
    pipeline = place(search.problem, search.chain.specs(partition))
    search.clock.spend(SECONDS_A_STAGE * len(partition))
    if not search.allows(partition) or not is_connected(pipeline):
        return math.inf, pipeline
    if search.recomputed.fits_never(partition, pipeline):
        return math.inf, pipeline
    return search.recomputed.promise_s(partition, pipeline), pipeline


def find_any(search: Search) -> None:
    """Where no candidate fits: any division of the layers that does, or the exact model's."""
    if search.best is not None:
        return
    _divide(search)
    if search.best is not None or search.infeasible or not model_applies(search):
        return
    model = partition_search(search, None, longest_plan_s(search.chain, search.max_stages))
    while search.best is None and not search.is_done():
        found = model.next(model.horizon_s, search.clock.left_s)
        for partition in found.partitions:
            search.consider(partition)
            model.exclude(partition, search.proved_s(partition))
        if found.is_exhausted:
            search.infeasible = all(math.isinf(s) for s in model.excluded.values()) and (
                search.problem.job.max_stages_per_device == 1
            )
            return


def _divide(search: Search) -> None:
    """A division of the layers that fits memory, if there is one."""
    if search.chain.length > MOST_LAYERS:
        return
    division = Division(search.chain)
    partition = division.partition()
    if partition is not None:
        search.consider(partition)
    else:
        single = search.problem.job.max_stages_per_device == 1
        search.infeasible = division.is_exact and single
