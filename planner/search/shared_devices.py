"""Plans with several stages a device: loops and Vs whose boundaries are moved, then walks.

An estimate for given stages (:mod:`planner.search.partition.bounds.shared`) takes microseconds and
moves the boundaries of every loop and V. A quick schedule, which takes longer and sees more, ranks
the best of them, and leads the walks from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.search.budget import SearchWork, TimeSlice
from planner.search.local_search import Walk, estimated_s
from planner.search.partition.candidates import shared_partitions
from planner.search.partition.chain import Partition
from planner.search.partition.local_search.searches import SHIFTS, Anneal
from planner.search.state import Search

MOVE_SHARE, RANK_SHARE = 0.3, 0.5
"""Shares of the time left for moving boundaries, then for quick schedules."""
RANKED, SCHEDULED, WALKS = 40, 6, 2
"""Partitions that get a quick schedule, all schedules, and a walk."""
SHIFTS_A_STAGE = 60
"""Moves of the boundaries of a partition, for each stage."""


def plan_shared(search: Search, time: TimeSlice) -> None:
    """Find plans with as many stages a device as the job allows."""
    moved = sorted(_moved(search, time.first(MOVE_SHARE * time.left_s)), key=lambda row: row[0])
    found = _ranked(
        search, [partition for _, partition in moved], time.first(RANK_SHARE * time.left_s)
    )
    for _, partition in found[:SCHEDULED]:
        if search.has_time and not search.is_done():
            search.consider(partition)
    units = tuple((number,) for number in range(len(search.problem.cluster.devices)))
    for number, (_, partition) in enumerate(found[:WALKS]):
        each_s = time.left_s / (min(len(found), WALKS) - number)
        Walk(search, units, search.settings.seed + number).go(partition, each_s)


def _ranked(
    search: Search, partitions: Sequence[Partition], time: TimeSlice
) -> list[tuple[float, Partition]]:
    """Return the first partitions that can run, the least times of quick schedules first."""
    rows: list[tuple[float, Partition]] = []
    for partition in list(dict.fromkeys(partitions))[:RANKED]:
        if not time.has_time() or search.is_done():
            break
        estimate_s = estimated_s(search, partition)
        if math.isfinite(estimate_s):
            rows.append((estimate_s, partition))
    return sorted(rows, key=lambda row: row[0])


def _moved(search: Search, time: TimeSlice) -> Iterator[tuple[float, Partition]]:
    """Yield loops and Vs, as they are and with their boundaries moved, with their estimates.

    Those with the least estimates are moved first, while there is time.
    """
    scorer = search.optimiser.scorer
    scored = sorted(_scored(search, time), key=lambda row: row[0])
    for number, (estimate_s, start) in enumerate(scored):
        yield estimate_s, search.optimiser.representative(start)
        if time.has_time():
            changes = SHIFTS_A_STAGE * len(start)
            walk = Anneal(scorer, search.most_stages, search.clock, number, SHIFTS, changes)
            *_, best = start, *walk.improve(start, time.has_time)
            numbered = scorer.numbered(best)
            if best != start and numbered is not None:
                yield scorer.score(numbered).bound_s, search.optimiser.representative(best)


def _scored(search: Search, time: TimeSlice) -> Iterator[tuple[float, Partition]]:
    """Yield loops and Vs with their estimates."""
    scorer = search.optimiser.scorer
    for start in dict.fromkeys(shared_partitions(search.chain)):
        if not time.has_time():
            return
        search.clock.charge(SearchWork.QUICK_BOUND)
        numbered = scorer.numbered(start)
        if numbered is not None:
            yield scorer.score(numbered).bound_s, start
