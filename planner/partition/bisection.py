"""Bisection for the least limit on the iteration time that something can keep."""

from __future__ import annotations

from collections.abc import Callable

MOST_STEPS = 50
"""Where nothing takes any time no relative tolerance is ever met."""


def narrowed_s(
    keeps: Callable[[float], bool],
    low_s: float,
    high_s: float,
    tolerance: float,
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[float, float]:
    """Halve the range of the least limit until its ends are near each other.

    Args:
        keeps: whether a limit, in seconds, can be kept.
        low_s: at most the least limit.
        high_s: a limit that can be kept; it is not tried.
        tolerance: width of the range at which to stop, as a share of its lower end.
        may_go_on: whether there is time for another step.

    Returns:
        The lower end, tried and not kept unless it is still ``low_s``, and the upper end, kept.
    """
    for _ in range(MOST_STEPS):
        if high_s - low_s <= tolerance * low_s or not may_go_on():
            break
        middle_s = (low_s + high_s) / 2
        if keeps(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s, high_s
