"""Quick schedules under a time limit: a few at first, all of them for what comes near the best."""

from collections.abc import Callable
from itertools import count

import pytest
from tiny_problems import tiny_problem

from planner.costs.placement import place
from planner.plan.operations import owners
from planner.search.budget import Clock, Settings, TimeSlice
from planner.search.partition.candidates import even_partition
from planner.search.partition.chain import Chain, Partition, StageChoice
from planner.search.schedule import heuristic
from planner.search.schedule.heuristic import (
    best_heuristic_schedule,
    fits_memory,
    never,
    quick_estimate_s,
    quick_schedules,
)
from planner.search.schedule.pipeline_groups import scheduled_forms
from planner.search.state import NEAR, Search, SearchTask
from planner.search.steps import complete_schedules
from planner.space import Backward


def after(schedules: int) -> Callable[[], bool]:
    """Time for so many schedules."""
    asked = count(1)
    return lambda: next(asked) < schedules


def search_of(microbatches: int, limit_s: float) -> tuple[Search, Partition]:
    """A search, and three stages of its problem."""
    problem = tiny_problem(3, layers=6, devices=3, microbatches=microbatches, replication=False)
    search = Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(limit_s, True))
    return search, even_partition(search.chain, 3)


@pytest.mark.parametrize("backward", ["whole", "split", "any"])
@pytest.mark.parametrize("seed", range(8))
def test_without_time_the_likely_schedules_follow_the_first_that_fits(
    seed: int, backward: Backward
) -> None:
    problem = tiny_problem(seed, layers=6, devices=3, microbatches=8, backward=backward)
    chain = Chain(problem)
    pipeline = place(problem, chain.specs(even_partition(chain, 3)))
    everything = [*quick_schedules(pipeline, backward=backward)]
    known = {(row.method, row.iteration_time_s) for row in everything}
    for number in (1, 3, 6):
        found = [*quick_schedules(pipeline, backward=backward, has_time=after(number))]
        assert {(row.method, row.iteration_time_s) for row in found} <= known
        assert any(fits_memory(row.timeline) for row in found) == any(
            fits_memory(row.timeline) for row in everything
        )
        assert len(found) < len(everything)
    best = best_heuristic_schedule(pipeline, backward=backward)
    few = best_heuristic_schedule(pipeline, backward=backward, has_time=never)
    assert (best is None) == (few is None)
    if best is not None and few is not None:
        estimate_s = quick_estimate_s(pipeline, split=backward != "whole")
        assert best.iteration_time_s <= few.iteration_time_s
        assert estimate_s is None or few.iteration_time_s <= 1.1 * estimate_s


def test_without_time_other_forms_are_tried_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of unlike speed: memory has room for the second way to assign microbatches alone."""
    problem = tiny_problem(1, layers=4, devices=4, microbatches=6, types=2)
    chain = Chain(problem)
    partition = (StageChoice(0, 2, ("d0", "d1")), StageChoice(2, 4, ("d2", "d3")))
    pipeline = place(problem, chain.specs(partition))
    forms = scheduled_forms(pipeline)
    assert len(forms) > 1
    last = forms[-1].owner
    monkeypatch.setattr(heuristic, "fits_memory", lambda t: owners(t.orders) == last)
    found = [*quick_schedules(pipeline, has_time=never)]
    assert any(owners(row.orders) == last for row in found)


def test_a_partition_gets_a_few_where_all_take_long_and_all_of_them_later() -> None:
    search, partition = search_of(microbatches=64, limit_s=2.0)
    found = search.consider(partition)
    assert found is not None
    assert found.has_few
    complete_schedules(search, TimeSlice(search.clock, 1e9))
    completed = search.candidates[partition]
    assert not completed.has_few
    thorough, same = search_of(microbatches=64, limit_s=1e3)
    full = thorough.consider(same)
    assert full is not None
    assert not full.has_few
    assert completed.schedule.orders == full.schedule.orders
    assert completed.schedule.iteration_time_s <= found.schedule.iteration_time_s


def test_a_partition_far_from_the_best_gets_a_few_and_is_not_completed() -> None:
    search, partition = search_of(microbatches=4, limit_s=1e3)
    best = search.consider(partition)
    assert best is not None
    assert not best.has_few
    slow = search.consider((StageChoice(0, 6, (partition[0].devices[0],)),))
    assert slow is not None
    assert slow.schedule.iteration_time_s > NEAR * search.best_s
    assert slow.has_few
    complete_schedules(search, TimeSlice(search.clock, 1e9))
    assert search.candidates[slow.partition].has_few


def test_work_may_go_on_until_the_limit_or_in_deterministic_mode_until_it_is_stopped() -> None:
    now = iter([0.0, 1.0, 3.0])
    clock = Clock(2.0, deterministic=False, now=lambda: next(now))
    assert clock.may_go_on(2.0)
    assert not clock.may_go_on(2.0)
    charged = Clock(2.0, deterministic=True)
    charged.spend(3.0)
    assert charged.may_go_on(2.0)
    charged.stop()
    assert not charged.may_go_on(2.0)
