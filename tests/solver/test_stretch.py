"""Schedules of many microbatches from those of a few."""

from collections import Counter

import pytest

from benchmarks.schedule.instances import chunks, uneven
from planner.search.budget import Clock, Settings
from planner.search.schedule.heuristic import best_heuristic_schedule, fits_memory
from planner.search.schedule.periodic import periodic_schedules, with_few_microbatches
from planner.search.schedule.search import schedule_pipeline
from planner.search.schedule.solve import MAX_OPERATIONS, ScheduleTask

pytestmark = pytest.mark.extensive


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [80, 203])
def test_every_operation_is_run_once_and_a_steady_schedule_stays_steady(
    count: int, split: bool
) -> None:
    pipeline = uneven(4, count, "double", 1, whole=not split).pipeline()
    short = with_few_microbatches(pipeline)
    assert short is not None
    assert (count - short.microbatches) % 8 == 0
    found = best_heuristic_schedule(short, backward="any" if split else "whole")
    assert found is not None
    wanted = Counter(
        (stage, kind, m)
        for stage in range(4)
        for kind in ("FIW" if split else "FB")
        for m in range(count)
    )
    times = []
    for schedule in periodic_schedules(pipeline, found):
        assert Counter(event.operation for event in schedule.timeline.operations) == wanted
        if fits_memory(schedule.timeline):
            times.append(schedule.iteration_time_s)
    whole = best_heuristic_schedule(pipeline, backward="any" if split else "whole")
    assert whole is not None
    assert min(times) <= 1.02 * whole.iteration_time_s


def test_few_microbatches_are_not_with_few_microbatches() -> None:
    assert with_few_microbatches(uneven(4, 64, "loose", 1).pipeline()) is None


def test_a_search_of_many_microbatches_is_no_worse_and_keeps_its_bound() -> None:
    pipeline = chunks(4, 400, "v", 1, whole=True, tapered=True).pipeline()
    assert MAX_OPERATIONS < 2 * 8 * 400
    quick = best_heuristic_schedule(pipeline)
    assert quick is not None
    settings = Settings(workers=1, deterministic=True)
    found = schedule_pipeline(pipeline, ScheduleTask(settings, Clock(6.0, True)))
    assert fits_memory(found.timeline)
    assert 0 < found.lower_bound_s <= found.iteration_time_s <= quick.iteration_time_s
