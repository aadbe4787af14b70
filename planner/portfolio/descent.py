"""Local search from the best partitions, judged by their schedules."""

from __future__ import annotations

from collections.abc import Iterator

from planner.costs.placement import PlacedPipeline, is_connected, place
from planner.partition.chain import Partition
from planner.partition.search.local_search import neighbours
from planner.portfolio.first_plans import SECONDS_A_STAGE
from planner.portfolio.search import SECONDS_AN_OPERATION, Candidate, Search
from planner.schedule.heuristic import probe_s

MOST_NEIGHBOURS = 4000
"""Of a partition, that are looked at."""
SECONDS_A_SCORE = 1e-4
"""What a quick bound counts in deterministic time."""
NEAR = 1.005
"""The best quick schedule is seldom further below a probe."""


def descend(search: Search, starts: int = 6, share: float = 0.35) -> None:
    """From the fastest candidates, step to a faster neighbour while there is one."""
    stop_s = (1 - share) * search.clock.left_s
    for start in search.fastest_of_each_length()[:starts]:
        current: Candidate | None = start
        while current is not None and search.clock.left_s > stop_s and not search.is_done():
            current = _better_neighbour(search, current, stop_s)


def _better_neighbour(search: Search, current: Candidate, stop_s: float) -> Candidate | None:
    """The first neighbour with a faster schedule, the least bounds first."""
    time_s = current.schedule.iteration_time_s
    for partition in _promising(search, current, stop_s):
        if search.clock.left_s <= stop_s or not search.has_time:
            return None
        pipeline = _worth_scheduling(search, partition, time_s)
        if pipeline is None:
            continue
        found = search.schedule(partition, pipeline)
        if found and found.schedule.iteration_time_s < time_s:
            return found
    return None


def _worth_scheduling(search: Search, partition: Partition, time_s: float) -> PlacedPipeline | None:
    """The placed stages if their schedules may beat a time."""
    search.clock.spend(SECONDS_A_STAGE * len(partition))
    pipeline = place(search.problem, search.chain.specs(partition))
    if not is_connected(pipeline):
        return None
    search.clock.spend(SECONDS_AN_OPERATION * pipeline.microbatches * len(partition) / 10)
    probed_s = probe_s(pipeline)
    if probed_s is not None and probed_s > NEAR * time_s:
        return None
    return pipeline if search.recomputed.promise_s(partition, pipeline) < time_s else None


def _promising(search: Search, current: Candidate, stop_s: float) -> list[Partition]:
    """Neighbours whose quick bound is below the current time, the least first."""
    quick, time_s = search.optimiser.quick, current.schedule.iteration_time_s
    rows: list[tuple[float, int, Partition]] = []
    for partition in _unlike(search, current):
        if search.clock.left_s <= stop_s or len(rows) >= MOST_NEIGHBOURS:
            break
        search.clock.spend(SECONDS_A_SCORE)
        numbered = quick.numbered(partition)
        bound_s = 0.0 if numbered is None else quick.score(numbered).bound_s
        if bound_s < time_s and search.allows(partition):
            rows.append((bound_s, len(rows), partition))
    return [partition for _, _, partition in sorted(rows)]


def _unlike(search: Search, current: Candidate) -> Iterator[Partition]:
    """Neighbours that differ by more than interchangeable devices and are not scheduled yet."""
    seen: set[Partition] = set()
    for neighbour in neighbours(search.chain, current.partition, search.max_stages):
        partition = search.optimiser.representative(neighbour)
        if partition not in seen and partition not in search.candidates:
            seen.add(partition)
            yield partition
