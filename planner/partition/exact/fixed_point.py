"""Times that are a fraction of a tick for each unit of something, rounded down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SCALE = 2**20
"""Fixed-point denominator of ticks a unit."""
LARGEST = 2**59
"""CP-SAT refuses sums that could leave 64 bits; this is far beyond every horizon."""
MOST_UNITS = 2**24
"""Bytes are counted in units so large that no more than this many are needed."""


@dataclass(frozen=True)
class ByteUnit:
    """So many bytes; sums are rounded down to it term by term."""

    bytes: int

    @classmethod
    def for_total(cls, total_bytes: int, most_units: int = MOST_UNITS) -> ByteUnit:
        """The smallest power of two of which the total has no more than ``most_units``."""
        return cls(1 << max(0, (total_bytes // most_units).bit_length()))

    def floor(self, sizes: Sequence[int]) -> list[int]:
        """Sizes in units, rounded down."""
        return [int(size) // self.bytes for size in sizes]


def fixed_point(ticks: float, times: int = 1) -> int:
    """In fixed point, rounded down; cut off where ``times`` as much would overflow."""
    return min(math.floor(ticks * SCALE), LARGEST // max(times, 1))
