"""Ticks lose nothing where times have a common unit, and never make a bound too high."""

from fractions import Fraction
from itertools import pairwise

import pytest
from builders import boundary, graph, layer, pipeline, star
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.placed_pipeline import PlacedPipeline
from planner.search.budget import Clock, Settings
from planner.search.schedule.measure import measure_bound_s, measured_s
from planner.search.schedule.search import schedule_pipeline
from planner.search.schedule.solve import ScheduleTask
from planner.search.schedule.ticks import in_ticks

KINDS = "FIWB"


def measured(times_s: list[tuple[float, float, float]], latency_us: float = 0.0) -> PlacedPipeline:
    """A stage a device by the seconds of F, I and W; transfers take a latency and nothing else."""
    names = [f"l{s}" for s in range(len(times_s))]
    fields = ("forward_s", "input_gradient_s", "weight_gradient_s")
    layers = [
        layer(name, measured={"unit": dict(zip(fields, row, strict=True))})
        for name, row in zip(names, times_s, strict=True)
    ]
    cuts = [boundary(u, v, bytes_=1) for u, v in pairwise(names)]
    stages = [((name,), (f"d{s}",)) for s, name in enumerate(names)]
    hub = star(len(names), 1e12, latency_us=latency_us / 2, shared=True)
    return pipeline(graph(layers, cuts), hub, stages, microbatches=2)


counts = st.tuples(*[st.integers(0, 100_000)] * 3)  # Whole backwards are twice as long.


@given(st.lists(counts, min_size=1, max_size=3), st.integers(0, 1000))
def test_multiples_of_a_microsecond_are_whole_ticks(rows, latency):
    placed = measured([tuple(n * 1e-6 for n in row) for row in rows], latency_us=float(2 * latency))
    ticks = in_ticks(placed)
    if not any(map(any, rows)):
        return
    assert ticks.is_exact
    for stage, row in enumerate(rows):
        for kind, count in zip("FIW", row, strict=True):
            exact = Fraction(count, 10**6) / Fraction(ticks.tick_s).limit_denominator(10**9)
            assert ticks.seconds(stage, kind, f"d{stage}") == exact
    for measure in ("makespan", "longest_stage_span"):
        bound_s = measure_bound_s(placed, measure, split=True)
        steps = bound_s / ticks.tick_s
        assert abs(ticks.least_ticks(bound_s) - steps) < 1e-6 * max(1, steps)


ugly = st.floats(1e-7, 1e3)


@given(st.lists(st.tuples(ugly, ugly, ugly), min_size=1, max_size=3), st.floats(0, 1e5))
def test_nothing_is_rounded_up(rows, latency_us):
    placed = measured(rows, latency_us)
    ticks = in_ticks(placed)
    hair = ticks.tick_s * 1e-6
    for stage in range(len(rows)):
        device = f"d{stage}"
        for kind in KINDS:
            length_s = placed.seconds(stage, kind, device)
            assert ticks.seconds(stage, kind, device) * ticks.tick_s <= length_s + hair
        tail = ticks.tail_s(stage, device) * ticks.tick_s
        assert tail <= placed.tail_s(stage, device) + hair
    for stage in range(len(rows) - 1):
        pair = f"d{stage}", f"d{stage + 1}"
        sent = ticks.forward_transfer(stage, *pair).seconds * ticks.tick_s
        assert sent <= placed.forward_transfer(stage, *pair).seconds + hair
    for measure in ("makespan", "longest_stage_span"):
        bound_s = measure_bound_s(placed, measure, split=True)
        assert ticks.least_ticks(bound_s) * ticks.tick_s <= bound_s * (1 + 1e-6)


def test_hairs_above_a_multiple_do_not_add_up_to_a_tick():
    placed = measured([(1.0, 1.0, 1.0)] * 3, latency_us=0.4)
    ticks = in_ticks(placed)
    bound_s = measure_bound_s(placed, "makespan", split=True)
    assert 9 < bound_s < 9.00001
    assert ticks.least_ticks(bound_s) * ticks.tick_s <= bound_s * (1 + 1e-9)


@pytest.mark.extensive
@settings(max_examples=20)
@given(st.lists(st.tuples(ugly, ugly, ugly), min_size=2, max_size=2), st.floats(0, 1e5))
def test_bound_in_ticks_stays_below_the_real_value(rows, latency_us):
    placed = measured(rows, latency_us)
    for measure in ("makespan", "longest_stage_span"):
        clock = Clock(0.3, deterministic=True)
        found = schedule_pipeline(placed, ScheduleTask(Settings(0, 1, True), clock, measure, "any"))
        assert found.lower_bound_s <= measured_s(found.timeline, measure)
        assert measure_bound_s(placed, measure, split=True) <= found.lower_bound_s * (1 + 1e-9)
