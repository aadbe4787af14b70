"""Numbers of devices by class: what a plan uses before a stage, and for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from planner.bounds.layers import IntArray
from planner.errors import PipeplanError

MOST_VECTORS = 2_000
MOST_PAIRS = 4e6
"""Vectors of devices, and pairs of them times vectors, that are looked at."""
MOST_STEPS = 5_000_000
"""Numbers that are compared at a time."""


NO_SIDE = 2
"""The side of a stage before which no stage was on one class alone."""


class DeviceVectors:
    """Numbers of devices by class: those used before a stage, of the stage, of the one before.

    Args:
        sizes: devices of each of C classes.
        replication: whether a stage may have several devices.

    Attributes:
        rows: (V, C) all vectors; the first is empty, the last has all devices.
        options: numbers of the O vectors on which a stage may lie.
        pair_used, pair_option: of each pair of vectors that leave room for each other, the one
            that is used before a stage and the stage's place among the options.
        used, option: the same of each of P pairs that states are made of: where there are two
            classes, a pair with a stage on both is there once for each side.
        after: the vector that is used after the stage.
        way_begin: (P + 1) of each pair, the beginning of its ways: the stages that may be before.
        way_before: of each way, the pair of the stage before and of what was used before that.
        way_between: of each way, the pair of vectors of the two stages.
        side: of each pair, the one of two classes that the last stage on one class alone was on;
            :data:`NO_SIDE` if there was none.
        is_mixed: of each pair, whether the stage is on two classes of two.
        begins: of each pair, whether a first stage may be of it.
        way_crosses: of each way, whether every microbatch changes the class at its cut, or at one
            since the last stage that was on one class alone.

    Raises:
        PipeplanError: if there are too many.
    """

    def __init__(self, sizes: Sequence[int], *, replication: bool) -> None:
        count = prod(size + 1 for size in sizes)
        # A pair is, for each class, one of (size + 1)(size + 2) / 2 choices.
        pairs = prod((size + 1) * (size + 2) // 2 for size in sizes)
        if count > MOST_VECTORS or pairs * count > MOST_PAIRS:
            raise PipeplanError(
                f"bounds: {count} combinations of devices of {len(sizes)} classes are too many"
            )
        self.rows = np.array(list(product(*(range(size + 1) for size in sizes))))
        strides = np.array([prod(s + 1 for s in sizes[k + 1 :]) for k in range(len(sizes))])
        held = self.rows.sum(axis=1)
        self.options = np.flatnonzero((held > 0) & (replication | (held == 1)))
        room = np.array(sizes)
        fits = [
            np.flatnonzero((self.rows + self.rows[n] <= room).all(axis=1)) for n in self.options
        ]
        self.used = np.concatenate(fits)
        self.option = np.repeat(np.arange(len(fits)), [len(row) for row in fits])
        stage = self.options[self.option]
        self.after = self.used + stage  # Vectors are numbered so that numbers add.
        number = np.full((count, count), -1)
        number[self.used, stage] = np.arange(len(self.used))
        pair, last = self._ways()
        left = (self.rows[self.used[pair]] - self.rows[last]) @ strides
        self.way_before, self.way_between = number[left, last], number[last, stage[pair]]
        self._set_sides(pair, self.way_before, self.way_between)

    def _set_sides(self, pair: IntArray, before: IntArray, between: IntArray) -> None:
        """Have each pair with a stage on two classes once for each side, and ways between them.

        Args:
            pair: of each way, the pair that it leads to.
            before: of each way, the pair of the stage before.
            between: of each way, the pair of the two stages.
        """
        held = self.rows[self.options[self.option]] > 0
        alone = held.argmax(axis=1)
        is_mixed = held.all(axis=1) & (held.shape[1] == 2)
        copies = np.where(is_mixed, NO_SIDE + 1, 1)
        begin = np.concatenate([[0], np.cumsum(copies)])
        self.pair_used, self.pair_option = self.used, self.option
        of = np.repeat(np.arange(len(copies)), copies)
        side = np.arange(len(of)) - begin[of]
        self.side = np.where(is_mixed[of], side, np.where(held.shape[1] == 2, alone[of], NO_SIDE))
        # From every side of the pair before, to the side that it leads to.
        way = np.repeat(np.arange(len(pair)), copies[before])
        place = np.arange(len(way)) - np.repeat(
            np.concatenate([[0], np.cumsum(copies[before])])[:-1], copies[before]
        )
        source = begin[before[way]] + place
        target = begin[pair[way]] + np.where(is_mixed[pair[way]], self.side[source], 0)
        order = np.argsort(target, kind="stable")
        source, target = source[order], target[order]
        self.way_before, self.way_between = source, between[way][order]
        self.way_begin = np.searchsorted(target, np.arange(len(of) + 1))
        sides = self.side[source], self.side[target]
        self.way_crosses = (sides[0] != sides[1]) & (np.maximum(*sides) < NO_SIDE)
        self.used, self.option, self.after = self.used[of], self.option[of], self.after[of]
        self.is_mixed = is_mixed[of]
        self.begins = (self.used == 0) & (~self.is_mixed | (self.side == NO_SIDE))

    def _ways(self) -> tuple[IntArray, IntArray]:
        """Return, in order of pairs, each pair with the vectors that the stage before may have."""
        options = self.rows[self.options]
        chunk = max(1, MOST_STEPS // options.size)
        pairs, lasts = [], []
        for begin in range(0, len(self.used), chunk):
            used = self.rows[self.used[begin : begin + chunk]]
            which, option = np.nonzero((options[None] <= used[:, None]).all(axis=2))
            pairs.append(begin + which)
            lasts.append(self.options[option])
        return np.concatenate(pairs), np.concatenate(lasts)
