"""The intervals of a chain as the relaxations look at them, with what memory takes.

Where memory is short, microbatches in flight cost: few of them mean waiting for round trips, many
of them recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from planner.search.partition.chain import Chain, FloatArray
from planner.search.partition.intervals import Intervals, coarse_cuts, interval_sums
from planner.search.partition.memory.interval_memory import IntervalMemory
from planner.search.partition.spans import MemoryLevel

EXACT = 6
"""Up to here every number in flight is a level of its own."""
GROWTH = 1.3
"""Beyond these numbers, what lies between two of them is taken for the lower one."""


def relaxed_intervals(chain: Chain) -> Intervals:
    """Return all intervals, or intervals of cells of a long chain.

    Where every cut is looked at, spans count what memory takes: in cells it is not known what a
    stage receives.
    """
    cuts = coarse_cuts(chain)
    every = len(cuts) == chain.length + 1
    levels = [memory_levels(chain.on(name), name) for name in chain.types] if every else None
    return Intervals(chain, cuts, relaxed=True, levels=levels)


def memory_levels(chain: Chain, device_type: str) -> tuple[MemoryLevel, ...]:
    """Return levels by cuts at all positions; none where memory does not bind.

    A plan whose stage has at most k microbatches in flight on a device of the type spends at least
    the seconds of some level with ``in_flight`` of k or more on recomputing each of them.
    """
    memory, count = IntervalMemory(chain), chain.problem.job.microbatches
    held = _held_bytes(chain, memory)
    capacity = chain.problem.cluster.device_types[device_type].capacity_bytes
    numbers = list(_numbers(count))
    levels: list[MemoryLevel] = []
    for number, following in pairwise([*numbers, count + 1]):
        extra_s = memory.extra_s(device_type, number, capacity, held)[:-1]
        if levels and np.array_equal(levels[-1].extra_s, extra_s):
            levels.pop()
        levels.append(MemoryLevel(following - 1, extra_s))
    return () if not levels[-1].extra_s.any() else tuple(levels)


def _numbers(count: int) -> Iterator[int]:
    number = 1
    while number <= count:
        yield number
        number = number + 1 if number < EXACT else int(number * GROWTH) + 1


def _held_bytes(chain: Chain, memory: IntervalMemory) -> FloatArray:
    """Return what is held besides the stashes at some moment when most of them are.

    Then a forward has just begun and makes its output; and with whole backwards the next operation
    that changes their number has received gradients and makes some. What takes no time may hold
    nothing.
    """
    forward = interval_sums(chain.least_forward_s) > 0
    buffers = np.where(forward, chain.cut_bytes[None, :], 0)
    if not chain.splits:
        gradients = chain.cut_gradient_bytes
        backward = interval_sums(chain.least_path_s - chain.least_forward_s) > 0
        both = np.where(forward & backward, gradients[:, None] + gradients[None, :], 0)
        buffers = np.maximum(buffers, both)
    return memory.always_bytes + buffers
