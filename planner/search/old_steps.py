"""The steps of a search: first plans, CP-SAT on schedules and partitions, fewer replicas.

No more replicas are kept than a plan has use for: a search for the fastest plan has no reason to
leave out devices, and replicas that another stage's load hides cost nothing. Their owner would
rather have them for other work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected, place
from planner.search.baseline_schedules import chunked_partitions
from planner.search.budget import SearchWork, TimeSlice
from planner.search.feasibility import MOST_LAYERS
from planner.search.local_search import FARTHEST
from planner.search.partition.baselines import GRID, classic_partitions
from planner.search.partition.bounds.partition import longest_plan_s, work_bound_s
from planner.search.partition.candidates import simple_partitions, thorough_partitions
from planner.search.partition.chain import Partition
from planner.search.partition.memory.division import Division
from planner.search.partition.optimiser import MAX_DEVICES_FOR_MODEL
from planner.search.partition.relaxations.column_relaxation import ColumnRelaxation
from planner.search.state import Candidate, Search

if TYPE_CHECKING:
    from planner.search.partition.cp_sat.search import PartitionSearch

PROMISING = 16
"""Partitions of the optimiser that may be scheduled, besides one a stage count."""
PROMISING_SHARE, ESTIMATE_SHARE = 0.4, 0.5
"""Shares of a step's time: for these, and of it for their quick estimates."""


def schedule_warm_starts(search: Search, partitions: Iterable[Partition]) -> None:
    """Schedule the partitions the user brought, whatever time it takes."""
    for partition in partitions:
        search.optimiser.offer(partition)
        search.consider(partition)


def bound_by_work(search: Search, time: TimeSlice) -> None:
    """Bound all plans by their total work."""
    search.found.raise_bound(work_bound_s(search.chain), "total work")


def try_simple_partitions(search: Search, time: TimeSlice) -> None:
    """Score simple partitions and schedule the best."""
    _offer(search, simple_partitions(search.chain, search.max_stages), time)
    _schedule_best(search, search.optimiser.promising(1)[:1], time)


def try_grid(search: Search, time: TimeSlice) -> None:
    """Schedule the even layouts that people try by hand, the quickest by estimate first."""
    partitions = GRID.partitions(search.chain)
    chunked = (row for one in partitions for row in chunked_partitions(search.chain, one))
    _schedule_best(search, [*partitions, *chunked], time)


def try_baselines(search: Search, time: TimeSlice) -> None:
    """Score the partitions of published planners and schedule the quickest by estimate."""
    found = _offer(search, classic_partitions(search.chain, search.max_stages), time)
    _schedule_best(search, found, time, most=1)


def _offer(search: Search, partitions: Iterable[Partition], time: TimeSlice) -> Sequence[Partition]:
    """Score partitions at the job's cuts while there is time or none of them can run; return these.

    Later ones are not even worked out: some planners take long.
    """
    found = []
    for partition in filter(None, map(search.chain.at_cuts, partitions)):
        found.append(partition)
        search.optimiser.offer(partition)
        if search.optimiser.best is not None and not time.has_time():
            break
    return found


def try_orders(search: Search, time: TimeSlice) -> None:
    """Find the best partitions along a few orders of the devices and schedule the best."""
    search.optimiser.start(time.has_time)
    if search.best is None or not search.optimiser.is_large:
        _schedule_best(search, search.optimiser.promising(1)[:1], time)


def relax_cluster(search: Search, time: TimeSlice) -> None:
    """Bound all partitions by relaxations of the cluster."""
    optimiser = search.optimiser
    if search.clock.left_s > 0:
        optimiser.relax(time.has_time)
        search.raise_single_bound(optimiser.bound_s, "relaxations of the cluster")


def bound_by_columns(search: Search, time: TimeSlice) -> None:
    """Bound all plans by what each device may hold, with any number of stages."""
    relaxation = ColumnRelaxation(search.chain, search.problem.cluster.link_table, search.clock)
    if not relaxation.is_tractable:
        return
    longest_s = longest_plan_s(search.chain, search.chain.stage_limit)
    bound_s = relaxation.bound_s(min(search.best_s, longest_s), may_go_on=time.has_time)
    search.found.raise_bound(bound_s, "columns of devices")


def certify(search: Search, time: TimeSlice) -> None:
    """Look for a certificate of the bound that was proved so far, or of a higher one."""
    clock = search.clock

    def has_time() -> bool:
        return clock.elapsed_s < time.end_s and not clock.is_stopped

    # At the end a few passes more than there is time for, rather than a bound without one.
    is_over = clock.left_s <= 0 and not clock.is_stopped
    bound_s = min(search.found.bound_s, search.best_s)
    best_s = bound_s if search.best is None else search.best_s
    search.certifier.certify(best_s, has_time, tries_once=is_over)
    search.found.raise_bound(search.certifier.bound_s, "certificate")
    search.optimiser.bound_s = max(search.optimiser.bound_s, search.certifier.bound_s)


def improve_partitions(search: Search, time: TimeSlice) -> None:
    """Improve partitions by their bounds, then schedule the most promising."""
    search_s = (1 - PROMISING_SHARE) * time.left_s
    search.optimiser.search(time.first(search_s).has_time, search.task.gap_limit)
    _schedule_best(search, search.optimiser.promising(PROMISING), time)


def try_thorough_partitions(search: Search, time: TimeSlice) -> None:
    """Schedule balanced partitions for every number of stages."""
    found = []
    for partition in thorough_partitions(search.chain, search.max_stages):
        found.append(partition)
        if not time.has_time() or search.is_done():
            break
    _schedule_best(search, found, time)


class _Promising(NamedTuple):
    """A partition that may be scheduled; no schedule of it is faster than ``promise_s``."""

    promise_s: float
    partition: Partition
    pipeline: PlacedPipeline


def _schedule_best(
    search: Search, partitions: Sequence[Partition], time: TimeSlice, most: int | None = None
) -> None:
    """Schedule partitions in order of quick estimates, while one may beat the incumbent.

    All quick schedules of one take many times as long as an estimate. One partition is scheduled
    whatever time is left of the step.

    Args:
        search: the search.
        partitions: at the job's cuts.
        time: of the step.
        most: so many are scheduled at most; None for all.
    """
    pool: list[_Promising] = []
    for partition in dict.fromkeys(map(search.optimiser.representative, partitions)):
        if not search.has_time:
            break
        promise_s, pipeline = _promise(search, partition)
        if math.isfinite(promise_s):
            pool.append(_Promising(promise_s, partition, pipeline))
    for number, row in enumerate(_by_estimate(search, pool, time)[:most]):
        if search.best is not None and search.is_done():
            return
        if not search.has_time or (number > 0 and not time.has_time()):
            return
        if row.promise_s < search.best_s and row.partition not in search.candidates:
            search.schedule(row.partition, row.pipeline)


def _by_estimate(search: Search, pool: Sequence[_Promising], time: TimeSlice) -> list[_Promising]:
    """Return partitions by quick estimates, those that there is no time to estimate last.

    Left out are those that may take much longer than the best known.
    """
    ranked = sorted(pool, key=lambda row: row.promise_s)
    if len(ranked) < 2:
        return ranked
    estimating = time.first(ESTIMATE_SHARE * time.left_s)
    estimated: list[tuple[float, _Promising]] = []
    for row in ranked:
        if estimated and not estimating.has_time():
            break
        estimated.append((_estimate_s(search, row), row))
    near = [pair for pair in estimated if pair[0] <= FARTHEST * search.best_s]
    near.sort(key=lambda pair: (pair[0], pair[1].promise_s))
    return [*(row for _, row in near), *ranked[len(estimated) :]]


def _estimate_s(search: Search, row: _Promising) -> float:
    """Return a quick estimate, the promise where memory is too small for that schedule."""
    if row.promise_s >= search.best_s or row.partition in search.candidates:
        return math.inf
    found = search.estimate_s(row.partition, row.pipeline)
    return row.promise_s if found is None else found


def _promise(search: Search, partition: Partition) -> tuple[float, PlacedPipeline]:
    """Return an optimistic iteration time and the placed stages; infinity if they cannot run."""
    pipeline = place(search.problem, search.chain.specs(partition))
    search.clock.charge(SearchWork.PLACED_STAGE, len(partition))
    if not search.allows(partition) or not is_connected(pipeline):
        return math.inf, pipeline
    if search.recomputed.fits_never(partition, pipeline):
        return math.inf, pipeline
    return search.recomputed.promise_s(partition, pipeline), pipeline


def find_any(search: Search, time: TimeSlice) -> None:
    """Look for any division of the layers that fits, or any partition of the CP-SAT model."""
    _divide(search)
    if search.best is not None or search.found.is_infeasible or not model_applies(search):
        return
    model = partition_search(search, None, longest_plan_s(search.chain, search.max_stages))
    while search.best is None and not search.is_done():
        found = model.next(model.horizon_s, time.left_s)
        for partition in found.partitions:
            search.consider(partition)
            model.exclude(partition, search.proved_s(partition))
        if found.is_exhausted:
            none_fits = all(math.isinf(bound_s) for bound_s in model.excluded.values())
            search.found.is_infeasible = none_fits and search.has_single_stages
            return


def _divide(search: Search) -> None:
    """Consider a division of the layers that fits memory, if there is one."""
    if search.chain.length > MOST_LAYERS:
        return
    division = Division(search.chain)
    partition = division.partition()
    if partition is not None:
        search.consider(partition)
    else:
        search.found.is_infeasible = division.is_exact and search.has_single_stages


# --- CP-SAT ---------------------------------------------------------------------------------------

MAX_LAYERS = 2000
"""Layers beyond which the partition model is too large to help; other bounds stand."""
IMPROVED = 3
"""Candidates whose schedules CP-SAT improves: the fastest, then of other numbers of stages."""
MODEL_SHARE, SCHEDULE_SHARE, GAP_SHARE = 0.4, 0.3, 0.6
"""Shares of the time left: for the model's next partitions, for the schedule of the best of them,
and for each schedule whose bound is the weakest at the end."""


def model_applies(search: Search) -> bool:
    """Return whether the cluster is small enough for the partition model."""
    is_small = len(search.problem.cluster.devices) <= MAX_DEVICES_FOR_MODEL
    return is_small and search.chain.length <= MAX_LAYERS


def partition_search(search: Search, known: Partition | None, horizon_s: float) -> PartitionSearch:
    """Return the partition model of a problem."""
    from planner.search.partition.cp_sat.search import PartitionSearch

    return PartitionSearch(
        search.chain,
        search.max_stages,
        search.settings,
        search.clock,
        known,
        horizon_s,
        least_s=min(search.optimiser.bound_s, horizon_s),
        constrain=search.task.constrain,
    )


def complete_schedules(search: Search, time: TimeSlice) -> None:
    """Try all quick schedules of candidates near the best that got a few, the fastest first."""
    for candidate in search.ranked():
        is_near = search.is_near(candidate.schedule.iteration_time_s)
        if not is_near or not time.has_time() or search.is_done():
            return
        search.complete(candidate)


def improve_schedules(search: Search, time: TimeSlice) -> None:
    """Improve the schedules of the fastest candidates: with shared devices, of each length."""
    chosen = search.ranked()[:1]
    others = (*search.fastest_with_shared_devices()[:1], *search.fastest_of_each_length())
    chosen += [candidate for candidate in others if candidate not in chosen]
    limit_s = max(time.left_s, 0) / IMPROVED
    for candidate in chosen[:IMPROVED]:
        if search.is_done():
            return
        search.improve(candidate, limit_s)


def search_partitions(search: Search, time: TimeSlice) -> None:
    """Schedule partitions in order of their bound, which raises the bound on every plan."""
    if search.best is None or search.is_done():
        return
    model = partition_search(search, search.best.partition, search.best_s)
    for known in search.candidates.values():
        if known.improved and not known.shares_devices:
            model.exclude(known.partition, known.proved_s)
    share = MODEL_SHARE
    while time.has_time() and not search.is_done():
        limit_s = max(share * time.left_s, min(1.0, time.left_s))
        found = model.next(search.best_s, limit_s)
        for partition in found.partitions:
            search.consider(partition)
        search.raise_single_bound(found.bound_s, "partition model", "solver")
        if found.is_exhausted:
            _close_gap(search, model)
            return
        if found.partitions:
            _finish_partition(search, model, found.partitions[-1])
        else:
            share = 1.0  # Nothing better in this time: the rest goes into the bound.


def _finish_partition(search: Search, model: PartitionSearch, partition: Partition) -> None:
    """Schedule the model's best partition as well as time allows and exclude it."""
    if partition in search.candidates:
        search.improve(search.candidates[partition], SCHEDULE_SHARE * search.clock.left_s)
    model.exclude(partition, search.proved_s(partition))
    search.raise_single_bound(model.bound_s, "schedules of the best partitions", "solver")


def _close_gap(search: Search, model: PartitionSearch) -> None:
    """Prove more about the scheduled partition with the weakest bound, again and again."""
    open_ = [search.candidates[p] for p in model.excluded if p in search.candidates]
    while open_ and not search.is_done():
        weakest = min(open_, key=lambda candidate: candidate.proved_s)
        open_.remove(weakest)
        limit_s = GAP_SHARE * search.clock.left_s
        improved = search.improve(replace(weakest, improved=False), limit_s)
        model.exclude(improved.partition, improved.proved_s)
        search.raise_single_bound(model.bound_s, "schedules of the best partitions", "solver")
        if improved.proved_s > weakest.proved_s:
            open_.append(improved)


# --- fewer replicas -------------------------------------------------------------------------------


def prune_replicas(search: Search, time: TimeSlice) -> None:
    """Drop replicas of the best plan's stages, the idlest first, while it takes no longer."""
    if search.best is None or search.clock.is_stopped:
        return
    for number in range(len(search.best.partition)):
        _prune_stage(search, number, time.end_s)


def _prune_stage(search: Search, number: int, stop_s: float) -> None:
    """Find by bisection how few replicas a stage needs."""
    best = search.best
    assert best is not None
    least, most = 1, len(best.partition[number].devices)
    while least < most and search.clock.elapsed_s + search.longest_s < stop_s:
        middle = (least + most) // 2
        partition = search.optimiser.representative(_with_busiest(best, number, middle))
        search.consider(partition)
        if search.best is not None and search.best.partition == partition:
            most = middle
        else:
            least = middle + 1


def _with_busiest(candidate: Candidate, number: int, count: int) -> Partition:
    """Return the candidate's stages, one of them on its ``count`` busiest devices only."""
    busy_s = candidate.schedule.timeline.busy_s
    stage = candidate.partition[number]
    busiest = sorted(stage.devices, key=lambda device: -busy_s[device])[:count]
    kept = tuple(device for device in stage.devices if device in busiest)
    changed = list(candidate.partition)
    changed[number] = replace(stage, devices=kept)
    return tuple(changed)
