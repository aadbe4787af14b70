"""Ideals: sets of blocks that contain everything that must not come after one of theirs.

The first stages of every contiguous split hold an ideal together, so a split is a chain of ideals
(Tarnawski et al. 2020, section 4). A family of ideals is a boolean array, one row an ideal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.solver.blocks import Blocks
from planner.search.budget import Clock

Family = NDArray[np.bool_]
SECONDS_PER_IDEAL = 2e-6
"""Deterministic time booked for making one ideal."""


def all_ideals(blocks: Blocks, limit: int, clock: Clock) -> Family | None:
    """Every ideal, smallest first; None if there are more than ``limit`` or time runs out."""
    levels, total = [], 0
    for level in _levels(blocks, limit):
        levels.append(level)
        total += len(level)
        clock.spend(len(level) * SECONDS_PER_IDEAL)
        if total > limit or clock.left_s <= 0:
            return None
    return np.concatenate(levels)


def _levels(blocks: Blocks, limit: int) -> Iterator[Family]:
    """The ideals of 0, 1, 2, … blocks; stops early after a level beyond the limit."""
    needs = _Needs(sorted(blocks.precedences))
    level = np.zeros((1, blocks.size), dtype=bool)
    for _ in range(blocks.size):
        yield level
        if len(level) > limit:
            return
        level = needs.grown(level)
    yield level


class _Needs:
    """The blocks that must be in an ideal before another can be added.

    Args:
        pairs: (what is needed, by which block).
    """

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        by_needer = sorted(pairs, key=lambda pair: pair[1])
        self._needed = [needed for needed, _ in by_needer]
        needers = [needer for _, needer in by_needer]
        self._needers, self._starts = np.unique(needers, return_index=True)

    def grown(self, level: Family) -> Family:
        """Every ideal that is one block larger than one of a level."""
        outside = ~level
        ready = outside.copy()
        if self._needed:
            lacks = np.logical_or.reduceat(outside[:, self._needed], self._starts, axis=1)
            ready[:, self._needers] &= ~lacks
        rows, added = np.nonzero(ready)
        grown = level[rows]
        grown[np.arange(len(rows)), added] = True
        return distinct(grown)


def distinct(family: Family) -> Family:
    """The rows of a family, each once."""
    packed = np.ascontiguousarray(np.packbits(family, axis=1))
    keys = packed.view([("", packed.dtype, packed.shape[1])]).ravel()
    _, first = np.unique(keys, return_index=True)
    return family[np.sort(first)]


def neighbours(blocks: Blocks, family: Family) -> Family:
    """Every ideal that is one block larger or smaller than one of the family."""
    larger = _Needs(sorted(blocks.precedences)).grown(family)
    turned = sorted((after, before) for before, after in blocks.precedences)
    return np.concatenate([larger, ~_Needs(turned).grown(~family)])


def prefixes(order: list[int]) -> Family:
    """The ideals along a linear order of all blocks, the empty and the full one included."""
    family = np.zeros((len(order) + 1, len(order)), dtype=bool)
    for position, block in enumerate(order):
        family[position + 1 :, block] = True
    return family
