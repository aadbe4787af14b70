"""Latency and bandwidth from messages and their answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.topology.measurements import fit_one_way, spread

SIZES = (8, 10**5, 2 * 10**5, 4 * 10**5)


def trips(latency_s: float, gb_per_s: float, repeats: int = 9) -> dict[int, list[float]]:
    return {n: [2 * latency_s + (n - 8) / (gb_per_s * 1e9)] * repeats for n in SIZES}


@given(st.floats(1e-6, 1e-2), st.floats(1e-3, 1e3))
def test_exact_times_give_exact_figures(latency_s: float, gb_per_s: float) -> None:
    way = fit_one_way("a", "b", trips(latency_s, gb_per_s))
    assert way.latency_s == pytest.approx(latency_s)
    assert way.bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=1e-4)


def test_four_of_nine_messages_may_be_disturbed() -> None:
    samples = trips(1e-4, 0.1)
    rng = random.Random(0)
    for row in samples.values():
        for index in rng.sample(range(9), 4):
            row[index] += rng.uniform(0, 1)
    way = fit_one_way("a", "b", samples)
    assert way.latency_s == pytest.approx(1e-4)
    assert way.bandwidth_gb_per_s == pytest.approx(0.1, rel=1e-3)


def test_of_messages_most_of_which_are_disturbed_the_fastest_count() -> None:
    samples = {n: [*row[:1], *(s + 0.3 for s in row[1:])] for n, row in trips(1e-4, 0.1).items()}
    assert fit_one_way("a", "b", samples).latency_s > 0.1
    way = fit_one_way("a", "b", samples, min)
    assert way.latency_s == pytest.approx(1e-4)
    assert way.bandwidth_gb_per_s == pytest.approx(0.1, rel=1e-3)


def test_one_size_that_is_slow_alone_does_not_bend_the_line() -> None:
    """As where a protocol changes with the size of messages."""
    samples = trips(1e-4, 0.1)
    samples[10**5] = [s * 1.5 for s in samples[10**5]]
    assert fit_one_way("a", "b", samples).bandwidth_gb_per_s == pytest.approx(0.1, rel=0.15)


def test_one_size_is_refused() -> None:
    with pytest.raises(PipeplanError, match="a > b: measured messages of 1 size"):
        fit_one_way("a", "b", {8: [1e-4]})


def test_longer_messages_that_take_no_longer_are_refused() -> None:
    with pytest.raises(PipeplanError, match="1,000 bytes took no longer than 8; measure larger"):
        fit_one_way("a", "b", {8: [1e-4] * 3, 1000: [1e-4] * 3})


def test_spread_is_half_the_middle_half_over_the_median() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(1 / 3)
    assert spread([7]) == 0
