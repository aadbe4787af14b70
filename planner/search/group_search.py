"""Plans of several equal groups of devices: one group is planned, and the others do the same.

Devices are divided into g groups along nodes; each runs every g-th microbatch. What a stage gets
are units of g devices, one of each group, in the dynamic program along an order of the units as
well as in the walk from the best partitions found: so reductions among all replicas count, while
microbatches stay in their group. Data parallelism is the special case of groups of one device.

Where the job asks for equal pipelines, one pipeline is searched by itself, by all steps of a
search, and its best partitions are tried on the devices of all. So is a problem without those
devices of a shared host that add little to what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.problem import Problem
from planner.search.budget import Clock, TimeSlice
from planner.search.groupings import Grouping, even_groupings, groupings_of, problem_of_one
from planner.search.local_search import Walk, estimated_s
from planner.search.partition.candidates import grid_partitions
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.dynamic_programs.device_orders import first_orders
from planner.search.partition.dynamic_programs.order_program import Order
from planner.search.state import Search, SearchTask
from planner.variants.problems import restricted_to

MOST_RANKS = 64
"""Devices of a group beyond which its dynamic program takes too long."""
MOST_ORDERS = 6
"""Orders of a group's devices that are tried."""
SCHEDULED = 6
"""Partitions that are scheduled, those with the least estimates."""
WALKS, LARGE_WALKS = 5, 2
"""Numbers of groups from whose best partitions there is a walk; fewer where estimates take long."""
NEAR = 1.01
"""How far an estimate may be above the least one; a schedule is mostly some percent faster."""
PROGRAM_SHARE, SCHEDULE_SHARE = 0.4, 0.3
"""Shares of the step's time: for estimates, and for schedules where there are many devices."""
BEST = 3
"""Partitions of one pipeline that are tried on the devices of all."""
WORTH = (0.5, 0.05)
"""Devices that add a smaller share of one device's work to their host's are left out."""
Run = Callable[[Search], None]
"""Runs the steps of a search."""


@dataclass(frozen=True)
class _Found:
    """A partition of equal groups, with the units its stages are made of."""

    estimate_s: float
    partition: Partition
    units: Order


def plan_groups(search: Search, time: TimeSlice) -> None:
    """Plan one of several equal groups of devices, for different numbers of groups."""
    if not search.problem.job.replication:
        return
    is_large = search.optimiser.is_large
    scheduling = time.first((PROGRAM_SHARE + SCHEDULE_SHARE) * time.left_s)
    rows = _partitions(search, time.first(PROGRAM_SHARE * time.left_s))
    found = sorted(rows, key=lambda row: (row.estimate_s, len(row.units[0])))
    for number, row in enumerate(found[:SCHEDULED]):
        is_near = row.estimate_s <= NEAR * found[0].estimate_s
        # On many devices a schedule takes long, and few partitions are worth one.
        if is_large and number > 0 and not (is_near and scheduling.has_time()):
            break
        if search.has_time and not search.is_done():
            search.optimiser.offer(row.partition)
            search.consider(row.partition)
    starts = _starts(found)[: LARGE_WALKS if is_large else WALKS]
    for number, row in enumerate(starts):
        each_s = time.left_s / (len(starts) - number)
        Walk(search, row.units, search.next_seed()).go(row.partition, each_s)


def _starts(found: Sequence[_Found]) -> list[_Found]:
    """Return the best of each number of groups of several devices.

    Walks in other groups from the same partition lead elsewhere.

    Args:
        found: the least estimates first; of equal ones the fewest groups, which leave most to
            choose.
    """
    starts: dict[int, _Found] = {}
    for row in found:
        if len(row.units) > 1:
            starts.setdefault(len(row.units[0]), row)
    return list(starts.values())


def _partitions(search: Search, time: TimeSlice) -> Iterator[_Found]:
    """Yield good partitions for each number of groups, small groups first.

    Those of all groups that take no program come first: on many devices programs take long.
    """
    groupings = [
        grouping
        for grouping in reversed(even_groupings(search.problem))
        if len(grouping[0]) <= MOST_RANKS
    ]
    grids = (_grids(search, grouping) for grouping in groupings)
    programs = (_along_orders(search, grouping, time) for grouping in groupings)
    for units, partition in chain.from_iterable(chain(grids, programs)):
        if not time.has_time() or search.is_done():
            return
        estimate_s = estimated_s(search, search.optimiser.representative(partition))
        if math.isfinite(estimate_s):
            yield _Found(estimate_s, partition, units)


def _grids(search: Search, grouping: Grouping) -> Iterator[tuple[Order, Partition]]:
    """Yield grids of a group's devices."""
    one = Chain(restricted_to(search.problem, grouping[0]))
    cluster, rows = one.problem.cluster, _rows(search, grouping)
    units = tuple(_unit(rows, rank) for rank in range(len(grouping[0])))
    for partition in grid_partitions(one, search.max_stages, cluster.device_names):
        yield units, everywhere(partition, grouping, cluster.numbers)


def _along_orders(
    search: Search, grouping: Grouping, time: TimeSlice
) -> Iterator[tuple[Order, Partition]]:
    """Yield the best partition along each order of a group's devices."""
    one = Chain(restricted_to(search.problem, grouping[0]))
    for order in islice(_orders(one, _rows(search, grouping)), MOST_ORDERS):
        found = search.optimiser.along(order, search.best_s, time.has_time)
        if found is not None:
            yield order, found


def _rows(search: Search, grouping: Grouping) -> list[list[int]]:
    """Return the numbers of each group's devices."""
    numbers = search.problem.cluster.numbers
    return [[numbers[device] for device in group] for group in grouping]


def _orders(one: Chain, rows: Sequence[Sequence[int]]) -> Iterator[Order]:
    """Yield orders of the units, by orders of the first group's devices that are not alike."""
    cluster = one.problem.cluster
    attached = [cluster.attachment(device) for device in cluster.device_names]
    seen: set[tuple[tuple[int, Hashable], ...]] = set()
    for order in first_orders(one):
        pattern = tuple((one.kinds[rank], attached[rank]) for (rank,) in order)
        if pattern not in seen:
            seen.add(pattern)
            yield tuple(_unit(rows, rank) for (rank,) in order)


def _unit(rows: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """Return the device of a rank in every group."""
    return tuple(sorted(row[rank] for row in rows))


# --- equal pipelines ------------------------------------------------------------------------------


def search_pipelines(search: Search, time: TimeSlice, run: Run) -> None:
    """Search one pipeline of every grouping of the devices, and schedule its best for all.

    Args:
        search: of a problem whose replicas must form equal pipelines.
        time: which all groupings share.
        run: the steps of the search of one pipeline.
    """
    groupings = [(search.problem.cluster.device_names,), *_of_several(search.problem)]
    for number, grouping in enumerate(groupings):
        limit_s = time.left_s / (len(groupings) - number)
        for partition in _best_of_one(search, grouping, limit_s, run):
            search.consider(partition)
        if search.clock.is_stopped or (search.best is not None and search.is_done()):
            return


def _of_several(problem: Problem) -> Iterator[Grouping]:
    return groupings_of(problem) if problem.job.microbatches > 1 else iter(())


def _best_of_one(
    search: Search, grouping: Grouping, limit_s: float, run: Run
) -> Iterator[Partition]:
    """Yield the best partitions of one pipeline, on the devices of all."""
    try:
        problem = problem_of_one(search.problem, grouping)
    except PipeplanError:  # A layer runs on none of its devices.
        return
    place_of = {device: place for place, device in enumerate(grouping[-1])}
    for partition in searched_apart(search, _part(search, problem), limit_s, run)[:BEST]:
        yield everywhere(partition, grouping, place_of)


def _part(search: Search, problem: Problem) -> SearchTask:
    """Return the task of searching a problem on some of the devices, of which no user speaks."""
    return replace(search.task, problem=problem, constrain=None)


def searched_apart(search: Search, task: SearchTask, limit_s: float, run: Run) -> list[Partition]:
    """Return the partitions that another search finds, the best first.

    Args:
        search: whose time it takes.
        task: of the other search.
        limit_s: for it.
        run: its steps.
    """
    other = Search(task, Clock(max(limit_s, 0.0), search.settings.deterministic))
    run(other)
    search.clock.spend(other.clock.elapsed_s)
    if other.clock.is_stopped:
        search.clock.stop()
    return [candidate.partition for candidate in other.ranked()]


# --- hosts whose devices slow each other ----------------------------------------------------------


def search_fewer_devices(search: Search, time: TimeSlice, run: Run) -> None:
    """Search without devices that add nothing to what their hosts compute at a time.

    The estimates that lead a search take every device for as fast as alone. Of a host that four
    devices keep no busier than two, two may do as well with fewer bubbles.

    Args:
        search: of a problem with hosts whose devices slow each other.
        time: which all numbers of devices share.
        run: the steps of the search of one of them.
    """
    cluster = search.problem.cluster
    kept = [_kept_devices(cluster, share) for share in WORTH]
    choices = [names for names in dict.fromkeys(kept) if len(names) < len(cluster.devices)]
    for number, names in enumerate(choices):
        limit_s = time.left_s / (len(choices) - number)
        try:
            problem = restricted_to(search.problem, names)
        except PipeplanError:  # A layer runs on none of its devices.
            continue
        for partition in searched_apart(search, _part(search, problem), limit_s, run)[:BEST]:
            search.consider(partition)


def _kept_devices(cluster: Cluster, share: float) -> tuple[str, ...]:
    """Return the devices without those that add less than a share of one's work to their host's."""
    gone: set[str] = set()
    for host in cluster.hosts:
        worth = [
            number
            for number, done in enumerate(host.work)
            if done - max(host.work[:number], default=0) >= share
        ]
        gone.update(host.devices[worth[-1] + 1 :])
    return tuple(name for name in cluster.device_names if name not in gone)


def everywhere(partition: Partition, grouping: Grouping, place_of: Mapping[str, int]) -> Partition:
    """Return the partition of one group on the devices of all.

    Args:
        partition: of one group.
        grouping: the devices of all groups.
        place_of: the place of each device in its group.
    """
    return tuple(
        replace(
            stage,
            devices=tuple(
                group[place_of[device]] for group in grouping for device in stage.devices
            ),
        )
        for stage in partition
    )
