"""The states of the checker's program: how many devices of each class are in use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.layers import IntArray

MOST_VECTORS = 2_000
MOST_PAIRS = 4e6
"""Vectors of devices, and pairs of them times vectors, that are looked at."""
MOST_STEPS = 5e6
"""Numbers that are compared at a time."""
UNKNOWN = 2
"""The side where no stage was on one class alone."""


class Vectors:
    """Numbers of devices by class: those used before a stage, of the stage, of the one before.

    A pair is a vector used before a stage and one of the stage. Where there are two classes, it
    also has a side: the class that the last stage on one class alone was on, if one was.

    Args:
        sizes: of the classes.
        replication: whether a stage may have several devices.

    Attributes:
        rows: all vectors; the first is empty.
        options: numbers of those on which a stage may lie.
        apart_used, apart_stage: numbers of vectors, for every two that leave each other devices.
        used, stage: numbers of vectors, by pair.
        option: the place of the second among the options.
        side: as above; :data:`UNKNOWN` if no stage was.
        is_split: by pair, whether its stage is on both of two classes.
        first: numbers of the pairs before which nothing is used.
        later: numbers of all others, with some ways to each.
        way: by way, the place of its pair among the later ones, in order.
        before: by way, the pair of the stage before and of what was used before that.
        between: by way, the two stages' vectors: their place among those apart.
        changes: by way, whether all microbatches have changed the class at its end since the last
            stage that was on the other one alone.

    Raises:
        PipeplanError: if there are too many.
    """

    def __init__(self, sizes: Sequence[int], *, replication: bool) -> None:
        count = prod(size + 1 for size in sizes)
        # A pair is, for each class, one of (size + 1)(size + 2) / 2 choices.
        pairs = prod((size + 1) * (size + 2) // 2 for size in sizes)
        if count > MOST_VECTORS or pairs * count > MOST_PAIRS:
            raise PipeplanError(
                f"certificate: {count} combinations of devices of {len(sizes)} classes are too "
                "many to check"
            )
        self.rows = np.array(list(product(*(range(size + 1) for size in sizes))))
        held = self.rows.sum(axis=1)
        self.options = np.flatnonzero((held > 0) & (replication | (held == 1)))
        fits = [
            np.flatnonzero((self.rows + self.rows[n] <= sizes).all(axis=1)) for n in self.options
        ]
        self.apart_used = np.concatenate(fits)
        self.apart_stage = np.repeat(self.options, [len(row) for row in fits])
        self._number = np.full((count, count), -1)
        self._number[self.apart_used, self.apart_stage] = np.arange(len(self.apart_used))
        self._number_pairs(by_side=len(sizes) == 2)
        self._find_ways()

    def _number_pairs(self, *, by_side: bool) -> None:
        """Tell three pairs apart by side where a stage is split over two classes."""
        on = self.rows[self.apart_stage] > 0
        both = np.asarray(on.all(axis=1) & by_side)
        split = np.flatnonzero(both)
        extend = np.concatenate([np.arange(len(on)), np.tile(split, 2)])
        self.used, self.stage = self.apart_used[extend], self.apart_stage[extend]
        self.option = np.searchsorted(self.options, self.stage)
        self.side = np.full(len(on), UNKNOWN)
        if by_side:
            self.side = np.where(on[:, 0], 0, 1)
        self.side = np.concatenate([self.side, np.repeat([1, UNKNOWN], len(split))])
        self.is_split = both[extend]
        # By side and place among those apart; one that is not split has the same for each side.
        self._pair = np.tile(np.arange(len(on)), (3, 1))
        self._pair[1:, split] = len(on) + np.arange(2 * len(split)).reshape(2, -1)
        is_first = (self.used == 0) & (~self.is_split | (self.side == UNKNOWN))
        self.first, self.later = np.flatnonzero(is_first), np.flatnonzero(self.used)

    def _find_ways(self) -> None:
        """Find every stage that may be before the one of each later pair."""
        apart, last = self._stages_before()
        used, stage = self.apart_used[apart], self.apart_stage[apart]
        left = self._number_of[tuple((self.rows[used] - self.rows[last]).T)]
        before, between = self._number[left, last], self._number[last, stage]
        # A pair that is split has a way from each side, the others only one.
        sides = range(3) if self.is_split.any() else range(1)
        came = np.concatenate([self._pair[side, before] for side in sides])
        is_new = np.concatenate([(side == 0) | self.is_split[before] for side in sides])
        after = self._pair[self.side[came], np.tile(apart, len(sides))]
        order = np.flatnonzero(is_new)[np.argsort(after[is_new], kind="stable")]
        self.before, after = came[order], after[order]
        self.between = np.tile(between, len(sides))[order]
        self.way = np.searchsorted(self.later, after)
        one, other = self.side[self.before], self.side[after]
        self.changes = (one != other) & (one != UNKNOWN) & ~self.is_split[after]

    @property
    def _number_of(self) -> IntArray:
        """The number of a vector, by its entries."""
        return np.arange(len(self.rows)).reshape(self.rows[-1] + 1)

    def _stages_before(self) -> tuple[IntArray, IntArray]:
        """Return places among those apart, and each vector that the stage before may have."""
        apart = np.flatnonzero(self.apart_used)
        used, options = self.rows[self.apart_used[apart]], self.rows[self.options]
        chunk = max(1, int(MOST_STEPS) // options.size)
        places, lasts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(used), chunk):
            within = (options[None] <= used[begin : begin + chunk, None]).all(axis=2)
            which, option = np.nonzero(within)
            places.append(apart[begin + which])
            lasts.append(self.options[option])
        return np.concatenate(places), np.concatenate(lasts)
