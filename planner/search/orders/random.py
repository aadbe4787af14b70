"""Random numbers for compiled code, from one word of state: the same on each thread and machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled


@compiled
def drawn(state: Any) -> Any:
    """Return 64 random bits (xorshift64*: Vigna 2016).

    Args:
        state: one number that is not 0.
    """
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return x * np.uint64(0x2545F4914F6CDD1D)


@compiled
def below(state: Any, count: Any) -> Any:
    """Return a random whole number from 0 to count - 1."""
    return np.int64((drawn(state) >> np.uint64(11)) % np.uint64(count))


@compiled
def uniform(state: Any) -> Any:
    """Return a random number from 0 to 1."""
    return np.float64(drawn(state) >> np.uint64(11)) * 2.0**-53
