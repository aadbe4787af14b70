"""CP-SAT on schedules and on partitions: better plans, and a bound on all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.partition.chain import Partition
from planner.partition.search.best import MAX_DEVICES_FOR_MODEL
from planner.portfolio.search import Search

if TYPE_CHECKING:
    from planner.partition.exact.search import PartitionSearch

MAX_LAYERS = 2000
"""Beyond this the partition model is too large to help; the relaxations and candidates stand."""


def model_applies(search: Search) -> bool:
    """Whether the cluster is small enough for the partition model."""
    small = len(search.problem.cluster.devices) <= MAX_DEVICES_FOR_MODEL
    return small and search.chain.length <= MAX_LAYERS


def partition_search(search: Search, known: Partition | None, horizon_s: float) -> PartitionSearch:
    """The partition model of a problem."""
    from planner.partition.exact.search import PartitionSearch

    return PartitionSearch(
        search.chain,
        search.max_stages,
        search.settings,
        search.clock,
        known,
        horizon_s,
        least_s=min(search.optimiser.bound_s, horizon_s),
        constrain=search.constrain,
    )


def improve_schedules(search: Search, count: int = 3, share: float = 0.25) -> None:
    """The schedules of the fastest candidate and of the fastest with other numbers of stages."""
    chosen = search.ranked()[:1]
    chosen += [c for c in search.fastest_of_each_length() if c not in chosen]
    limit_s = share * max(search.clock.left_s, 0) / count
    for candidate in chosen[:count]:
        if search.is_done():
            return
        search.improve(candidate, limit_s)


def search_partitions(search: Search) -> None:
    """Partitions in order of their bound, each scheduled; raises the bound on every plan."""
    if search.best is None or search.is_done() or not model_applies(search):
        return
    model = partition_search(search, search.best.partition, search.best_s)
    for known in search.candidates.values():
        if known.improved and not known.shares_devices:
            model.exclude(known.partition, known.proved_s)
    share = 0.4
    while not search.is_done():
        limit_s = max(share * search.clock.left_s, min(1.0, search.clock.left_s))
        found = model.next(search.best_s, limit_s)
        for partition in found.partitions:
            search.consider(partition)
        search.raise_single_bound(found.bound_s, "partition model")
        if found.is_exhausted:
            _close_gap(search, model)
            return
        if found.partitions:
            _finish_partition(search, model, found.partitions[-1])
        else:
            share = 1.0  # Nothing better in this time: the rest goes into the bound.


def _finish_partition(search: Search, model: PartitionSearch, partition: Partition) -> None:
    """Schedule the model's best partition as well as we can and go on without it."""
    if partition in search.candidates:
        search.improve(search.candidates[partition], 0.3 * search.clock.left_s)
    model.exclude(partition, search.proved_s(partition))
    search.raise_single_bound(model.bound_s, "schedules of the best partitions")


def _close_gap(search: Search, model: PartitionSearch) -> None:
    """Only scheduled partitions are left: prove more about the one with the weakest bound."""
    open_ = [search.candidates[p] for p in model.excluded if p in search.candidates]
    while open_ and not search.is_done():
        weakest = min(open_, key=lambda candidate: candidate.proved_s)
        open_.remove(weakest)
        again = search.improve(replace(weakest, improved=False), 0.6 * search.clock.left_s)
        model.exclude(again.partition, again.proved_s)
        search.raise_single_bound(model.bound_s, "schedules of the best partitions")
        if again.proved_s > weakest.proved_s:
            open_.append(again)
