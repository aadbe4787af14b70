"""A plan that keeps its time: of the fastest ones, that with the least 95th percentile under noise.

Compared are the fastest partitions, each with the schedule that the search found and with all
quick ones: where more microbatches are in flight a late one delays the next device less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.portfolio.search import SECONDS_AN_OPERATION, Candidate, Search
from planner.result import Robustness
from planner.robustness import Noise, NoisyTimes, times_under_noise
from planner.schedule.heuristic import Schedule, fits_memory, quick_schedules

SLOWER = 0.02
"""Without noise the plan takes at most this share longer than the fastest."""
MARGIN = 1e-3
"""By this share its 95th percentile must be below the fastest plan's; less may be chance."""
MOST_PARTITIONS = 8
SHARE = 0.1
"""Of the whole time, kept back from the search."""
SECONDS_A_SAMPLE = 2e-8
"""What an event under noise counts in deterministic time, for each sample."""


@dataclass(frozen=True)
class RobustChoice:
    """The schedule that was chosen, and what it was compared with."""

    schedule: Schedule
    robustness: Robustness


def choose_robust(search: Search, noise: Noise) -> RobustChoice | None:
    """Of the plans within :data:`SLOWER` of the fastest, the one that keeps its time best.

    Deterministic in deterministic mode. The clock's limit is taken to be the whole time less
    :data:`SHARE`; the fastest plan is replayed under noise whatever time is left.

    Returns:
        None if the search was interrupted or found nothing.
    """
    if search.best is None or search.clock.is_stopped:
        return None
    stop_s = search.limit_s / (1 - SHARE)
    _schedule_near(search, (1 + SLOWER) * search.best_s, stop_s)
    compared = _compared(search, search.best, noise, stop_s)
    (_, fastest), (schedule, least) = compared[0], min(compared, key=_rank)
    if least.percentile_95_s > (1 - MARGIN) * fastest.percentile_95_s:
        schedule, least = compared[0]
    return RobustChoice(schedule, Robustness(noise, least, fastest, len(compared)))


def _compared(
    search: Search, best: Candidate, noise: Noise, stop_s: float
) -> list[tuple[Schedule, NoisyTimes]]:
    """Schedules with their times under noise, the fastest first, while there is time."""
    found: dict[object, tuple[Schedule, NoisyTimes]] = {}
    for schedule in _contenders(search, best, stop_s):
        if found and search.clock.elapsed_s >= stop_s:
            break
        key = _key(schedule)
        if key not in found:
            found[key] = schedule, _replay(search, schedule, noise)
    return list(found.values())


def _rank(row: tuple[Schedule, NoisyTimes]) -> tuple[float, int]:
    """Of plans that keep their time as well the one on fewer devices is better."""
    schedule, times = row
    return times.percentile_95_s, len(schedule.timeline.pipeline.devices)


def _schedule_near(search: Search, longest_s: float, stop_s: float) -> None:
    """The most promising partitions that the search left out because they cannot be the fastest."""
    promising = search.optimiser.promising(MOST_PARTITIONS)
    for partition in dict.fromkeys(map(search.optimiser.representative, promising)):
        if search.clock.elapsed_s + search.longest_s >= stop_s:
            return
        if partition not in search.candidates and search.proved_s(partition) <= longest_s:
            search.consider(partition)


def _replay(search: Search, schedule: Schedule, noise: Noise) -> NoisyTimes:
    timeline = schedule.timeline
    events = len(timeline.operations) + len(timeline.transfers)
    search.clock.spend(SECONDS_A_SAMPLE * noise.samples * events)
    return times_under_noise(timeline, noise)


def _contenders(search: Search, best: Candidate, stop_s: float) -> Iterator[Schedule]:
    """Schedules that are fast enough and fit memory: what the search found, then quick ones."""
    longest_s = (1 + SLOWER) * search.best_s
    near = [best, *(candidate for candidate in search.ranked() if candidate is not best)]
    near = [c for c in near if c.schedule.iteration_time_s <= longest_s][:MOST_PARTITIONS]
    yield from (candidate.schedule for candidate in near)
    for candidate in near:
        if search.clock.elapsed_s + search.longest_s >= stop_s:
            return
        pipeline = candidate.schedule.timeline.pipeline
        operations = pipeline.microbatches * len(pipeline.stages)
        search.clock.spend(SECONDS_AN_OPERATION * operations)
        for schedule in quick_schedules(pipeline):
            if schedule.iteration_time_s <= longest_s and fits_memory(schedule.timeline):
                yield schedule


def _key(schedule: Schedule) -> object:
    """The same for the same orders of the same stages."""
    stages = tuple(stage.spec for stage in schedule.timeline.pipeline.stages)
    return stages, tuple((device, tuple(order)) for device, order in schedule.orders.items())
