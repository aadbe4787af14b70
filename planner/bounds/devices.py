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
        held = self.rows.sum(axis=1)
        self.options = np.flatnonzero((held > 0) & (replication | (held == 1)))
        room = np.array(sizes)
        fits = [
            np.flatnonzero((self.rows + self.rows[n] <= room).all(axis=1)) for n in self.options
        ]
        self.pair_used = np.concatenate(fits)
        self.pair_option = np.repeat(np.arange(len(fits)), [len(row) for row in fits])
        held = self.rows[self.options[self.pair_option]] > 0
        two = len(sizes) == 2
        is_mixed = np.asarray(held.all(axis=1) & two)
        pair = np.repeat(np.arange(len(held)), np.where(is_mixed, NO_SIDE + 1, 1))
        side, alone = np.arange(len(pair)) - np.searchsorted(pair, pair), held.argmax(axis=1)
        self.used, self.option = self.pair_used[pair], self.pair_option[pair]
        self.is_mixed = is_mixed[pair]
        self.side = np.where(self.is_mixed, side, alone[pair] if two else NO_SIDE)
        stage = self.options[self.option]
        self.after = self.used + stage  # Vectors are numbered so that numbers add.
        self.begins = (self.used == 0) & (~self.is_mixed | (self.side == NO_SIDE))
        number = np.full((count, count), -1)
        number[self.pair_used, self.options[self.pair_option]] = np.arange(len(held))
        self._find_ways(stage, number)

    def _find_ways(self, stage: IntArray, number: IntArray) -> None:
        """Find, for each pair, the stages that may be before.

        Args:
            stage: of each pair, the vector of the stage.
            number: of each two vectors that leave room for each other, the pair.
        """
        order = np.argsort(self.used, kind="stable")
        begin, end = (
            np.searchsorted(self.used[order], self.after, side=side) for side in ("left", "right")
        )
        source = np.repeat(np.arange(len(order)), end - begin)
        first = np.cumsum(end - begin) - (end - begin)
        target = order[np.arange(len(source)) - first[source] + begin[source]]
        # A stage on both classes keeps the side of the stage before.
        keeps = ~self.is_mixed[target] | (self.side[target] == self.side[source])
        place = np.flatnonzero(keeps)[np.argsort(target[keeps], kind="stable")]
        source, target = source[place], target[place]
        self.way_before, self.way_between = source, number[stage[source], stage[target]]
        self.way_begin = np.searchsorted(target, np.arange(len(order) + 1))
        sides = self.side[source], self.side[target]
        self.way_crosses = (sides[0] != sides[1]) & (np.maximum(*sides) < NO_SIDE)
