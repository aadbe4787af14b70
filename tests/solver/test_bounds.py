"""No schedule of a partition beats its bound, and none of any partition the bound on all."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from builders import GIGA, boundary, cluster, device_type, graph, layer, link
from builders import pipeline as pipeline_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import orders_for, partitions, problems

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place
from planner.plan.problem import Problem
from planner.search.partition.bounds.partition import in_flight_bound_s, work_bound_s
from planner.search.partition.bounds.schedule import schedule_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.spans import ReplicaSpan, least_span_s
from planner.simulation.simulator import simulate

ROUNDING = 1 + 1e-9


@pytest.mark.extensive
@given(st.data())
def test_no_random_schedule_beats_the_bounds(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems(slowed=True))
    pipeline = place(problem, data.draw(partitions(problem, recompute=False)))
    split = data.draw(st.booleans())
    orders = data.draw(orders_for(pipeline, split_backwards=split))
    time_s = simulate(pipeline, orders).iteration_time_s
    assert schedule_bound_s(pipeline, split=split) <= time_s * ROUNDING
    assert 0 <= work_bound_s(Chain(problem)) <= time_s * ROUNDING


@pytest.mark.extensive
@given(st.data())
def test_recomputing_only_raises_the_bound(data: st.DataObject) -> None:
    problem: Problem = data.draw(problems(slowed=True))
    specs = data.draw(partitions(problem))
    plain = [replace(spec, recompute=()) for spec in specs]
    raised = schedule_bound_s(place(problem, specs))
    assert raised * ROUNDING >= schedule_bound_s(place(problem, plain))


@pytest.mark.extensive
@given(st.data())
def test_no_schedule_within_memory_beats_the_bound_from_it(data: st.DataObject) -> None:
    """Memory is set to what a random schedule needs: it fits, and the bound must allow it."""
    problem: Problem = data.draw(problems(slowed=True))
    pipeline = place(problem, data.draw(partitions(problem)))
    split = data.draw(st.booleans())
    orders = data.draw(orders_for(pipeline, split_backwards=split))
    timeline = simulate(pipeline, orders)
    capacity = timeline.peak_memory_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlacedPipeline, "capacity_bytes", lambda self, device: capacity[device])
        bound_s = in_flight_bound_s(pipeline, split=split)
        assert bound_s <= timeline.iteration_time_s * ROUNDING


def test_few_microbatches_in_memory_take_their_round_trips() -> None:
    """Two stages of 1 s and 2 s; the first has room for one: four round trips of 6 s."""
    rows = [layer("a", stash_bytes=GIGA), layer("b")]
    machines = cluster(["d0", "d1"], [link("d0", "d1", gb_per_s=1000)])
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    tight = {"unit": device_type(memory_gib=1.5)}
    placed = [
        pipeline_of(the_graph, machine, [(["a"], ["d0"]), (["b"], ["d1"])], microbatches=4)
        for machine in (machines, cluster(["d0", "d1"], [link("d0", "d1")], types=tight))
    ]
    ample, short = (in_flight_bound_s(pipeline) for pipeline in placed)
    assert short == pytest.approx(4 * 6)
    assert ample == pytest.approx(1 + 4 * 3 + 2)  # The last gradient goes home through a.


@given(st.lists(st.sampled_from([0.5, 0.7, 1.0, 1.3, 3.0]), min_size=1, max_size=4), st.data())
def test_microbatches_are_split_as_the_best_of_all_splits(
    seconds: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 6))
    # Without a path to the last stage, for ever.
    beyond = st.sampled_from([0.0, 0.4, 3.0, math.inf])
    spans = [
        ReplicaSpan(each, data.draw(st.sampled_from([0.0, 0.2, 1.5])), data.draw(beyond))
        for each in seconds
    ]
    every = [
        max(span.seconds(n) for n, span in zip(numbers, spans, strict=True) if n)
        for numbers in product(range(count + 1), repeat=len(seconds))
        if sum(numbers) == count
    ]
    near_s = data.draw(st.sampled_from([0.0, 0.5, 1.0])) * min(every)
    found = least_span_s(Counter(spans), count, 0.0 if math.isnan(near_s) else near_s)
    assert found == pytest.approx(min(every), rel=1e-9)


def test_replicas_that_take_no_time_take_all_microbatches() -> None:
    assert least_span_s({ReplicaSpan(0.0, 0.0, 0.0): 1, ReplicaSpan(1.0, 1.0, 0.0): 3}, 8) == 0.0


def test_all_backwards_follow_the_first_return_and_the_last_return_all_forwards() -> None:
    assert ReplicaSpan(1.0, 2.0, 0.5).seconds(4) == 12.0
    assert ReplicaSpan(1.0, 2.0, 10.0).seconds(4) == 1.0 + 10.0 + 4 * 2.0
    assert ReplicaSpan(3.0, 2.0, 10.0).seconds(4) == 4 * 3.0 + 10.0 + 2.0
