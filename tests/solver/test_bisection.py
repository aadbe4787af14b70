"""The bisection closes in on the least limit from both sides."""

import pytest

from planner.search.partition.dynamic_programs.core import narrowed_s


@pytest.mark.parametrize("least_s", [1.0, 1.7, 3.14159, 8.0])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-9])
def test_the_least_limit_lies_between_ends_within_the_tolerance(
    least_s: float, tolerance: float
) -> None:
    low_s, high_s = narrowed_s(lambda limit_s: limit_s >= least_s, 1.0, 8.0, tolerance)
    assert low_s <= least_s <= high_s
    assert high_s - low_s <= tolerance * low_s


def test_where_nothing_takes_time_the_steps_end() -> None:
    low_s, high_s = narrowed_s(lambda _: True, 0.0, 1.0, 1e-4)
    assert low_s == 0.0
    assert 0.0 < high_s < 1e-12


def test_without_time_left_the_ends_stay() -> None:
    assert narrowed_s(_never, 1.0, 8.0, 1e-4, may_go_on=lambda: False) == (1.0, 8.0)


def test_ends_within_the_tolerance_are_not_tried_again() -> None:
    assert narrowed_s(_never, 1.0, 1.05, 0.1) == (1.0, 1.05)


def _never(limit_s: float) -> bool:
    raise AssertionError(f"{limit_s} was tried")
