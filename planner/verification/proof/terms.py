"""How many microbatches a device can run in what is left of a time.

Whatever limits a device is a list of terms of one kind: n microbatches take n times something, and
there is so much time for them. The least number over all terms counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from planner.verification.proof.figures import FloatArray


class Term(NamedTuple):
    """Something that n microbatches do one after the other.

    Attributes:
        spare_s: that there is for it.
        each_s: that a microbatch takes.
    """

    spare_s: FloatArray
    each_s: FloatArray


def fewest(terms: Iterable[Term], count: int) -> FloatArray:
    """Return how many of so many microbatches all terms have time for; below 0 if not for none."""
    most: FloatArray = np.array(float(count))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for spare_s, each_s in terms:
            # Nothing in no time is not a number, and no limit.
            most = np.fmin(most, spare_s / each_s)
    return np.asarray(np.floor(most))


def round_trips(
    spare_s: FloatArray,
    forward_s: FloatArray,
    back_s: FloatArray,
    ahead_s: FloatArray,
    waits_s: tuple[float, FloatArray],
) -> list[Term]:
    """Return the terms of a device's forwards and backwards, and of its waits for messages.

    No backward is before the first microbatch's return, no forward after the last one left. The
    messages at the first cut of the first forward and of the last backward lie outside the time.

    Args:
        spare_s: for all of them.
        forward_s: of a microbatch.
        back_s: of its gradient, or of all of its backward.
        ahead_s: the way of a microbatch behind the stage and back.
        waits_s: for messages of a microbatch at the stage's first cut, and behind it.
    """
    before_s, behind_s = waits_s
    return [
        Term(spare_s + before_s, forward_s + back_s + (before_s + behind_s)),
        Term(spare_s - forward_s - ahead_s, back_s),
        Term(spare_s - back_s - ahead_s, forward_s),
    ]
