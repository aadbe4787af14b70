"""Microbatches that reach a stage one after the other, and gradients that leave it so.

A stage with r replicas passes no more than r microbatches at a time, so the replicas of the next
stage begin one after the other. Seen from the end of an iteration, the same holds for the last
gradients that it sends back: its replicas end one after the other.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from planner.verification.proof.layers import FloatArray, IntArray

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatches that are counted, the first or the last ones; others count as the next lower."""


def passed_s(come_s: FloatArray, each_s: FloatArray, replicas: IntArray) -> FloatArray:
    """Return when the first microbatches have passed a stage, at the earliest.

    Of the first k that have, all but j - 1 came with number j or later, and some replica ran as
    many of these as an even share, one after the other.

    Args:
        come_s: when they come to it, a row for each stage, a column for each of some first
            :data:`NUMBERS`.
        each_s: a microbatch on the fastest replica, by stage.
        replicas: by stage.
    """
    past_s = np.empty_like(come_s)
    for place, count in enumerate(NUMBERS[: come_s.shape[1]]):
        rows = [
            come_s[:, before] + (1 + (count - number) // replicas) * each_s
            for before, number in enumerate(NUMBERS[: place + 1])
        ]
        past_s[:, place] = np.max(rows, axis=0)
    return past_s


def around_s(come_s: FloatArray, follow_s: FloatArray) -> FloatArray:
    """Return what passes before one of some replicas begins and after it has ended, at least.

    Of m replicas, number i to begin is m + 1 - i to end at best, if none is to have less time than
    the others; three of these pairs are looked at.

    Args:
        come_s: before the first replicas begin, as in :func:`passed_s`.
        follow_s: after the last ones have ended.
    """
    found = np.empty_like(come_s)
    for place, count in enumerate(NUMBERS[: come_s.shape[1]]):
        middle = int(np.searchsorted(NUMBERS, (count + 1) // 2, side="right")) - 1
        pairs = [(place, 0), (0, place), (middle, middle)]
        found[:, place] = np.max([come_s[:, a] + follow_s[:, b] for a, b in pairs], axis=0)
    return found


def replicas_by_number(replicas: IntArray, columns: int) -> IntArray:
    """Return how many of so many replicas count as each of :data:`NUMBERS`, by row."""
    ends = [*NUMBERS[:columns], np.iinfo(np.int64).max]
    return np.array([np.clip(replicas - a + 1, 0, b - a) for a, b in pairwise(ends)]).T
