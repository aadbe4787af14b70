"""Searches for schedules of given stages, beside every order of tiny pipelines and replays."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import boundary, graph, layer, pipeline, star
from hypothesis import assume, given
from schedule_brute_force import brute_force, fits
from strategies import Scheduled, scheduled
from tiny_pipelines import A_LITTLE, SOLVED_SHAPES, TICK, draw_tiny

from planner.errors import InfeasibleError, PipeplanError
from planner.plan.operations import owners
from planner.search.clock import Clock
from planner.search.orders.bound import StagesBound
from planner.search.orders.search import ScheduleSearch, search_schedule
from planner.search.orders.stages import StageOrders
from planner.simulation.simulator import simulate


def searched(placed, *, splits: bool, limit_s: float = 1.0, **options) -> ScheduleSearch:
    clock = Clock(limit_s, deterministic=True)
    search = ScheduleSearch(placed, clock, splits=splits, **options)
    search.run()
    return search


@pytest.mark.parametrize("shape", SOLVED_SHAPES, ids=str)
def test_bound_and_value_enclose_the_best_of_all_orders(shape: tuple) -> None:
    device, microbatches, split = shape
    best = 0
    for seed in range(2):
        tiny = draw_tiny(random.Random(seed), device, microbatches, optimizer=seed % 3 == 0)
        tiny = replace(tiny, backward="split" if split else "whole")
        least_s = brute_force(tiny, split=split).makespan
        found = searched(tiny.placed, splits=split)
        assert found.bound_s <= least_s * TICK
        assert least_s <= found.best_s * A_LITTLE
        best += found.best_s <= least_s * A_LITTLE
        if found.best is not None:
            starts = {tuple(row.operation): row.start_s for row in found.best.operations}
            assert fits(tiny, starts)
    assert best >= 1


@given(scheduled(slowed=True))
def test_bounds_hold_and_annealed_orders_take_what_they_say(case: Scheduled) -> None:
    """With replicas, shared links, reductions and slowed hosts, beside the replay of objects."""
    placed = case.pipeline
    assume(placed.problem.job.lengths is None)
    timeline = simulate(placed, case.orders)
    kinds = {row.operation.kind for row in timeline.operations}
    bound_s = StagesBound(placed, splits="I" in kinds).seconds
    if not timeline.overflow_bytes:
        assert bound_s <= timeline.iteration_time_s * A_LITTLE
    stages = StageOrders(placed)
    if stages.replay(case.orders) == float("inf"):
        assert timeline.overflow_bytes
        return
    found_s = stages.anneal(0.01, 300)
    after = simulate(placed, stages.annealed)
    assert after.iteration_time_s == pytest.approx(found_s, rel=1e-12)
    assert not after.overflow_bytes
    assert found_s <= timeline.iteration_time_s * A_LITTLE
    assert owners(stages.annealed) == owners(case.orders)


def test_work_counted_gives_the_same_schedule_every_time() -> None:
    tiny = draw_tiny(random.Random(3), (0, 1, 2, 0), 6)
    rows = [searched(tiny.placed, splits=True, limit_s=0.5, seed=2) for _ in range(2)]
    assert rows[0].best is not None
    assert rows[1].best is not None
    assert rows[0].best.orders == rows[1].best.orders
    assert rows[0].bound_s == rows[1].bound_s


def test_equal_pipelines_run_the_same_order() -> None:
    told = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=4)])
    stages = [("a", ["d0", "d1"]), ("b", ["d2", "d3"])]
    placed = pipeline(told, star(4), stages, microbatches=8, equal_pipelines=True)
    found = searched(placed, splits=False, limit_s=0.3)
    assert found.best is not None
    orders = found.best.orders
    for one, other in (("d0", "d1"), ("d2", "d3")):
        assert [row._replace(microbatch=row.microbatch + 1) for row in orders[one]] == orders[other]


def test_a_job_of_1f1b_gets_that_order() -> None:
    told = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=4)])
    placed = pipeline(
        told,
        star(2),
        [("a", ["d0"]), ("b", ["d1"])],
        microbatches=3,
        order="1f1b",
        replication=False,
    )
    found = searched(placed, splits=False)
    assert found.best is not None
    assert " ".join(map(str, found.best.orders["d0"])) == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_what_cannot_be_searched_is_refused() -> None:
    told = graph([layer("a", stash_bytes=10**16), layer("b")], [boundary("a", "b", bytes_=4)])
    small = pipeline(told, star(2), [("a", ["d0"]), ("b", ["d1"])])
    specs = [stage.spec for stage in small.stages]
    with pytest.raises(InfeasibleError, match="fits memory"):
        search_schedule(small.problem, specs, time_limit_s=0.1, deterministic=True)
    with pytest.raises(PipeplanError, match="time_limit_s"):
        search_schedule(small.problem, specs, time_limit_s=0)


def test_stages_in_a_v_are_no_slower_than_the_schedules_made_for_them() -> None:
    """Eight devices, twenty microbatches of 1 s forward and 2 s backward on each: ZB-V's 63.5 s."""
    names = [f"l{n}" for n in range(16)]
    told = graph(
        [layer(name, 0.5, 1.0) for name in names],
        [boundary(u, v, bytes_=1) for u, v in pairwise(names)],
    )
    stages = [((name,), (f"d{min(n, 15 - n)}",)) for n, name in enumerate(names)]
    fields = {"microbatches": 20, "max_stages_per_device": 2, "backward": "any"}
    placed = pipeline(told, star(8, 1e6), stages, **fields)
    assert searched(placed, splits=True).best_s == pytest.approx(63.5)
