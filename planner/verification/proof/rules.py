"""How many microbatches a device can run in what is left of a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.verification.proof.layers import FloatArray

MARGIN = 1 + 1e-9
"""A time is refuted only if one that is longer by this factor is: rounding refutes nothing."""


def fewest(rules: Sequence[tuple[FloatArray, FloatArray]], count: int) -> FloatArray:
    """Return how many times all of several things fit, each by its spare time; below 0 if not."""
    most: FloatArray | float = float(count)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for spare_s, each_s in rules:
            # Nothing in no time is not a number, and no limit.
            most = np.fmin(most, spare_s / each_s)
    return np.asarray(np.floor(most))


def trips(
    spare_s: FloatArray, forward: FloatArray, back: FloatArray, ahead_s: FloatArray
) -> list[tuple[FloatArray, FloatArray]]:
    """A device's forwards and backwards, of which none is before the first microbatch's return.

    Nor is the last one's forward after the last return: three times that n microbatches take, each
    n times something and what remains of the spare time for it.
    """
    return [
        (spare_s, forward + back),
        (spare_s - forward - ahead_s, back),
        (spare_s - back - ahead_s, forward),
    ]
