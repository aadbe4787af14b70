"""Steps of collectives, whatever links carry their messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Algorithm(NamedTuple):
    """Equal steps one after another; in each, every edge carries a message of ``bytes_``."""

    steps: int
    bytes_: float
    edges: list[tuple[str, str]]


def all_reduce_algorithms(devices: Sequence[str], bytes_: int) -> tuple[Algorithm, Algorithm]:
    """Return ring and binary tree over two devices or more in the given order.

    Ring (Patarasuk and Yuan 2009): 2(r-1) steps of bytes/r each. Tree: up and down, the whole
    message at each of ceil(log2 r) levels.
    """
    count = len(devices)
    ring = list(pairwise([*devices, devices[0]]))
    tree = [(devices[(child - 1) // 2], devices[child]) for child in range(1, count)]
    return (
        Algorithm(2 * (count - 1), bytes_ / count, ring),
        Algorithm(2 * math.ceil(math.log2(count)), bytes_, tree),
    )


def ring_half(devices: Sequence[str], bytes_: int) -> Algorithm:
    """Return a reduce-scatter or an all-gather by a ring: either half of its all-reduce."""
    ring, _ = all_reduce_algorithms(devices, bytes_)
    return ring._replace(steps=ring.steps // 2)
