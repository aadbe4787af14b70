"""Schedules of many microbatches from those of a few."""

from collections import Counter

import pytest

from benchmarks.schedule_instances import chunks, uneven
from planner.schedule.heuristic import best_heuristic_schedule, fits_memory
from planner.schedule.search import schedule_pipeline
from planner.schedule.solve import MAX_OPERATIONS
from planner.schedule.stretch import shortened, stretched
from planner.solver_settings import Clock, Settings


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [80, 203])
def test_every_operation_is_run_once_and_a_steady_schedule_stays_steady(
    count: int, split: bool
) -> None:
    pipeline = uneven(4, count, "double", 1, whole=not split).pipeline()
    short = shortened(pipeline)
    assert short is not None
    assert (count - short.microbatches) % 8 == 0
    found = best_heuristic_schedule(short, split=split)
    assert found is not None
    wanted = Counter(
        (stage, kind, m)
        for stage in range(4)
        for kind in ("FIW" if split else "FB")
        for m in range(count)
    )
    times = []
    for schedule in stretched(pipeline, found):
        assert Counter(event.operation for event in schedule.timeline.operations) == wanted
        if fits_memory(schedule.timeline):
            times.append(schedule.iteration_time_s)
    whole = best_heuristic_schedule(pipeline, split=split)
    assert whole is not None
    assert min(times) <= 1.02 * whole.iteration_time_s


def test_few_microbatches_are_not_shortened() -> None:
    assert shortened(uneven(4, 64, "loose", 1).pipeline()) is None


def test_a_search_of_many_microbatches_is_no_worse_and_keeps_its_bound() -> None:
    pipeline = chunks(4, 400, "v", 1, whole=True, tapered=True).pipeline()
    assert MAX_OPERATIONS < 2 * 8 * 400
    quick = best_heuristic_schedule(pipeline)
    assert quick is not None
    settings = Settings(workers=1, deterministic=True)
    found = schedule_pipeline(pipeline, settings, Clock(6.0, True))
    assert fits_memory(found.timeline)
    assert 0 < found.lower_bound_s <= found.iteration_time_s <= quick.iteration_time_s
