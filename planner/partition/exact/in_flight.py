"""How many microbatches are in flight at each stage: few enough for memory, many for speed.

The bound of planner.partition.bounds.in_flight as decisions: with at most k in flight, blocks of k
microbatches take a round trip each.
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT = 16
"""Up to here every number in flight is told apart."""
GROWTH = 1.2
"""Beyond, numbers within this factor are taken together."""


@dataclass(frozen=True)
class Level:
    """From ``least`` to ``most`` microbatches in flight: memory for the least, speed of the most.

    Attributes:
        least, most: microbatches in flight.
        blocks: full blocks before the last one.
        rest: microbatches of the last block.
    """

    least: int
    most: int
    blocks: int
    rest: int


def in_flight_levels(microbatches: int) -> tuple[Level, ...]:
    """Levels that together are every number from 1 to all microbatches."""
    levels: list[Level] = []
    least = 1
    while least <= microbatches:
        most = least
        if least > EXACT:
            blocks = -(-microbatches // least)
            alike = microbatches if blocks == 1 else (microbatches - 1) // (blocks - 1)
            most = min(microbatches, max(alike, int(GROWTH * least)))
        blocks = -(-microbatches // most) - 1
        levels.append(Level(least, most, blocks, microbatches - blocks * most))
        least = most + 1
    return tuple(levels)
