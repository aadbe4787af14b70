"""Microbatches that reach a stage one after the other, and gradients that leave it so.

A stage with r replicas passes no more than r microbatches at a time, so the replicas of the next
stage begin one after the other. Seen from the end of an iteration, the same holds for the last
gradients that it sends back: its replicas end one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from planner.verification.proof.figures import FloatArray, IntArray

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatches that are counted, the first or the last ones; others count as the next lower."""


def passed_s(come_s: FloatArray, each_s: FloatArray, replicas: IntArray) -> FloatArray:
    """Return when the first microbatches have passed a stage, at the earliest.

    Of the first k that have, all but j - 1 came with number j or later, and some replica ran as
    many of these as an even share, one after the other. For three j of each k.

    Args:
        come_s: when they come to it, a row for each of some first :data:`NUMBERS`, a column for
            each stage.
        each_s: a microbatch on the fastest replica, by stage.
        replicas: by stage.
    """
    past_s: FloatArray = come_s + each_s
    for place in range(1, len(come_s)):
        for before in {0, place // 2}:
            rounds = 1 + (NUMBERS[place] - NUMBERS[before]) // replicas
            np.maximum(past_s[place], come_s[before] + rounds * each_s, out=past_s[place])
    return past_s


def around_s(come_s: FloatArray, follow_s: FloatArray) -> FloatArray:
    """Return what passes before one of some replicas begins and after it has ended, at least.

    Of m replicas, one is number m or later to begin, one number m or later from the end to end,
    and one is number (m + 1) / 2, rounded down, or later in both.

    Args:
        come_s: before the first replicas begin, as in :func:`passed_s`.
        follow_s: after the last ones have ended.
    """
    found: FloatArray = np.maximum(come_s + follow_s[0], come_s[0] + follow_s)
    for place, count in enumerate(NUMBERS[: len(come_s)]):
        middle = int(np.searchsorted(NUMBERS, (count + 1) // 2, side="right")) - 1
        np.maximum(found[place], come_s[middle] + follow_s[middle], out=found[place])
    return found


def replicas_by_number(replicas: IntArray, numbers: int) -> IntArray:
    """Return how many of so many replicas count as each of the first :data:`NUMBERS`, by row."""
    ends = [*NUMBERS[:numbers], np.iinfo(np.int64).max]
    return np.array([np.clip(replicas - a + 1, 0, b - a) for a, b in pairwise(ends)])


def most_in_order(held: IntArray, most: Mapping[tuple[int, int], FloatArray]) -> FloatArray:
    """Return the most that replicas of several classes run in any order of the classes.

    Args:
        held: replicas of each class.
        most: what one of a class runs, by class and by the place of its number in :data:`NUMBERS`.
    """
    places = 1 + max(place for _, place in most)
    nothing = (0,) * len(held)
    reached: dict[tuple[int, ...], FloatArray] = {nothing: np.zeros_like(most[min(most)])}
    for number in range(1, int(held.sum()) + 1):
        place = min(places, int(np.searchsorted(NUMBERS, number, side="right"))) - 1
        following: dict[tuple[int, ...], FloatArray] = {}
        for state, total in reached.items():
            for k in np.flatnonzero(np.array(state) < held).tolist():
                after = (*state[:k], state[k] + 1, *state[k + 1 :])
                found = total + most[k, place]
                following[after] = np.maximum(following.get(after, found), found)
        reached = following
    return reached[tuple(int(n) for n in held)]
