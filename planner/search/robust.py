"""Robust plans: of the fastest ones, that with the least 95th percentile under noise.

The fastest partitions are compared, each with the schedule that the search found and with all
quick ones: where more microbatches are in flight a late one delays the next device less.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.search.budget import SearchWork
from planner.search.near import ChosenSchedule, candidates_near, end_of_choice_s, key_of
from planner.search.result import Robustness
from planner.search.schedule.heuristic import Schedule, fits_memory, quick_schedules
from planner.search.schedule.pipeline_groups import operation_count
from planner.search.state import Candidate, Search
from planner.simulation.noise import Noise, NoisyTimes, times_under_noise

SLOWER = 0.02
"""Without noise the plan takes at most this share longer than the fastest."""
MARGIN = 1e-3
"""Share by which its 95th percentile must be below the fastest plan's; less may be chance."""
MOST_PARTITIONS = 8


def choose_robust(search: Search, noise: Noise) -> ChosenSchedule | None:
    """Return the plan within :data:`SLOWER` of the fastest that varies least under noise.

    Deterministic in deterministic mode. The fastest plan is replayed under noise whatever time is
    left.

    Returns:
        None if the search was interrupted or found nothing.
    """
    if search.best is None or search.clock.is_stopped:
        return None
    compared = [
        (schedule, _replay(search, schedule, noise)) for schedule in schedules_near(search, SLOWER)
    ]
    (_, fastest), (schedule, least) = compared[0], min(compared, key=_rank)
    if least.percentile_95_s > (1 - MARGIN) * fastest.percentile_95_s:
        schedule, least = compared[0]
    return ChosenSchedule(schedule, Robustness(noise, least, fastest, len(compared)))


def schedules_near(search: Search, slower: float) -> Iterator[Schedule]:
    """Yield schedules to compare by something else than time, each once: the fastest first.

    It is yielded whatever time is left.

    Args:
        search: that is over and has a plan.
        slower: share by which they may take longer than the fastest.
    """
    best, stop_s = search.best, end_of_choice_s(search)
    assert best is not None
    _schedule_near(search, (1 + slower) * search.best_s, stop_s)
    seen: set[object] = set()
    for schedule in _contenders(search, best, (1 + slower) * search.best_s, stop_s):
        if seen and search.clock.elapsed_s >= stop_s:
            return
        key = key_of(schedule)
        if key not in seen:
            seen.add(key)
            yield schedule


def _rank(row: tuple[Schedule, NoisyTimes]) -> tuple[float, int]:
    """Rank by the 95th percentile; of equal ones the plan on fewer devices is better."""
    schedule, times = row
    return times.percentile_95_s, len(schedule.timeline.pipeline.devices)


def _schedule_near(search: Search, longest_s: float, stop_s: float) -> None:
    """Schedule promising partitions that were left out because they cannot be the fastest."""
    promising = search.optimiser.promising(MOST_PARTITIONS)
    for partition in dict.fromkeys(map(search.optimiser.representative, promising)):
        if search.clock.elapsed_s + search.longest_s >= stop_s:
            return
        if partition not in search.candidates and search.proved_s(partition) <= longest_s:
            search.consider(partition)


def _replay(search: Search, schedule: Schedule, noise: Noise) -> NoisyTimes:
    timeline = schedule.timeline
    events = len(timeline.operations) + len(timeline.transfers)
    search.clock.charge(SearchWork.NOISY_EVENT, noise.samples * events)
    return times_under_noise(timeline, noise)


def _contenders(
    search: Search, best: Candidate, longest_s: float, stop_s: float
) -> Iterator[Schedule]:
    """Yield schedules that are fast enough and fit memory: those found, then quick ones."""
    near = candidates_near(search, best, longest_s)[:MOST_PARTITIONS]
    yield from (candidate.schedule for candidate in near)
    for candidate in near:
        if search.clock.elapsed_s + search.longest_s >= stop_s:
            return
        pipeline = candidate.schedule.timeline.pipeline
        search.clock.charge(SearchWork.SCHEDULED_OPERATION, operation_count(pipeline))
        for schedule in quick_schedules(pipeline, backward=pipeline.problem.job.backward):
            if schedule.iteration_time_s <= longest_s and fits_memory(schedule.timeline):
                yield schedule
