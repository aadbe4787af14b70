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


class DeviceVectors:
    """Numbers of devices by class: those used before a stage, of the stage, of the one before.

    Args:
        sizes: devices of each of C classes.
        replication: whether a stage may have several devices.

    Attributes:
        rows: (V, C) all vectors; the first is empty, the last has all devices.
        options: numbers of the O vectors on which a stage may lie.
        used, option: of each of P pairs, the vector that is used before a stage and the stage's
            place among the options.
        after: the vector that is used after the stage.
        way_begin: (P + 1) of each pair, the beginning of its ways: the stages that may be before.
        way_before: of each way, the pair of the stage before and of what was used before that.
        way_between: of each way, the pair of the two stages' vectors.

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
        self.way_begin = np.searchsorted(pair, np.arange(len(self.used) + 1))

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
