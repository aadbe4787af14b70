"""The fastest published schedule: what it runs, that it fits, and what it is no slower than."""

import random
from collections import Counter

import pytest
from builders import graph, layer, pipeline, star
from hypothesis import given
from hypothesis import strategies as st
from strategies import Scheduled, scheduled
from tiny_pipelines import TinyPipeline, draw_tiny

from planner.plan.operations import Operation, owners
from planner.schedules.assignment import assignments, balanced_assignment
from planner.schedules.best import best_schedule
from planner.schedules.listed import list_orders, list_rules, split_stages
from planner.schedules.published import published_orders
from planner.schedules.whole import one_by_one
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

SHAPES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)]


def drawn(seed: int) -> TinyPipeline:
    rng = random.Random(seed)
    options = {"zeros": seed % 3 == 0, "buffers": seed % 4 == 0}
    return draw_tiny(rng, rng.choice(SHAPES), rng.randint(1, 7), **options)


def assert_runs_each_once(timeline: Timeline) -> None:
    ran = Counter(event.operation for event in timeline.operations)
    kinds: dict[tuple[int, int], set[str]] = {}
    for operation in ran:
        kinds.setdefault((operation.stage, operation.microbatch), set()).add(operation.kind)
    pipe = timeline.pipeline
    assert set(ran.values()) == {1}
    assert set(kinds) == {
        (stage, m) for stage in range(len(pipe.stages)) for m in range(pipe.microbatches)
    }
    assert all(found in ({"F", "B"}, {"F", "I", "W"}) for found in kinds.values())


@given(scheduled(slowed=True, shards=True), st.sampled_from(["whole", "any", "split"]))
def test_no_published_schedule_that_fits_is_faster(case: Scheduled, backward: str) -> None:
    best = best_schedule(case.pipeline, backward=backward)
    assert best is not None
    assert_runs_each_once(best.timeline)
    assert not best.timeline.overflow_bytes
    if backward == "split":
        return
    for owner in assignments(case.pipeline):
        for _, orders in published_orders(case.pipeline, owner, split=False):
            found = simulate(case.pipeline, orders)
            if not found.overflow_bytes:
                assert best.iteration_time_s <= found.iteration_time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_where_memory_binds_it_fits_or_one_microbatch_does_not(seed: int) -> None:
    placed = drawn(seed).placed
    best = best_schedule(placed)
    if best is None:
        alone = simulate(placed, one_by_one(placed, balanced_assignment(placed)))
        assert alone.overflow_bytes
        return
    assert_runs_each_once(best.timeline)
    assert not best.timeline.overflow_bytes
    assert best.timeline == simulate(best.timeline.pipeline, best.orders)


@pytest.mark.parametrize("seed", range(60))
def test_list_schedules_keep_to_memory_and_run_everything_once(seed: int) -> None:
    placed = drawn(seed).placed
    owner = balanced_assignment(placed)
    for split in (False, True):
        for rule in list_rules(placed, split=split):
            orders = list_orders(placed, owner, rule)
            if orders is not None:
                timeline = simulate(placed, orders)
                assert not timeline.overflow_bytes
                assert_runs_each_once(timeline)
                assert {o.stage for row in orders.values() for o in row if o.kind == "I"} <= (
                    split_stages(placed) if split else set()
                )


def test_backwards_are_split_where_memory_has_room() -> None:
    placed = TinyPipeline(
        forward=(3, 3, 3),
        input_gradient=(3, 3, 3),
        weight_gradient=(2, 2, 2),
        send=(1, 1),
        kept=(1, 1, 1),
        kept_for_weights=(1, 30, 1),
        cut=(1, 1),
        device=(0, 1, 2),
        room=(20, 20, 20),
        optimizer=(0, 0, 0),
        microbatches=6,
    ).placed
    assert split_stages(placed) == {0, 2}
    mixed, whole = (best_schedule(placed, backward=kinds) for kinds in ("any", "whole"))
    assert mixed is not None
    assert whole is not None
    assert mixed.iteration_time_s < whole.iteration_time_s


def test_in_equal_pipelines_all_do_the_same() -> None:
    stages = [(("a",), ("d0", "d1")), (("b",), ("d2", "d3"))]
    rows = graph([layer("a", 1, 2), layer("b", 1, 2)])
    placed = pipeline(rows, star(4), stages, microbatches=8, equal_pipelines=True)
    best = best_schedule(placed)
    assert best is not None
    assert best.method.endswith("in 2 equal pipelines")
    owner = owners(best.orders)
    for device, other in (("d0", "d1"), ("d2", "d3")):
        later = [Operation(o.stage, o.kind, o.microbatch + 1) for o in best.orders[device]]
        assert list(best.orders[other]) == later
    assert all((owner[0, m], owner[1, m]) in {("d0", "d2"), ("d1", "d3")} for m in range(8))
