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

    Args:
        sizes: of the classes.
        replication: whether a stage may have several devices.

    Attributes:
        rows: all vectors; the first is empty.
        options: numbers of those on which a stage may lie.
        used, stage: numbers of vectors, for every pair that leaves devices for the stage.
        option: the place of the second among the options.
        first: numbers of the pairs before which nothing is used.
        later: numbers of all others, with some ways to each.
        way: by way, the place of its pair among the later ones, in order.
        before: by way, the pair of the stage before and of what was used before that.
        between: by way, the pair of the two stages' vectors, one of those apart.
        apart_used, apart_stage, apart_later: used, stage and later of pairs of vectors alone;
            where there are two classes, ``used``, ``stage``, ``option``, ``first`` and ``later``
            tell pairs apart whose stage is split over both, by side.
        side: by pair, the one of two classes that the last stage on one class alone was on;
            :data:`UNKNOWN` if there is none.
        is_split: by pair, whether its stage is on both of two classes.
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
        strides = np.array([prod(s + 1 for s in sizes[k + 1 :]) for k in range(len(sizes))])
        held = self.rows.sum(axis=1)
        self.options = np.flatnonzero((held > 0) & (replication | (held == 1)))
        room = np.array(sizes)
        fits = [
            np.flatnonzero((self.rows + self.rows[n] <= room).all(axis=1)) for n in self.options
        ]
        self.used = np.concatenate(fits)
        self.option = np.repeat(np.arange(len(fits)), [len(row) for row in fits])
        self.stage = self.options[self.option]
        number = np.full((count, count), -1)
        number[self.used, self.stage] = np.arange(len(self.used))
        self.first, self.later = np.flatnonzero(self.used == 0), np.flatnonzero(self.used)
        self.way, last = self._ways()
        pair = self.later[self.way]
        left = (self.rows[self.used[pair]] - self.rows[last]) @ strides
        self.before, self.between = number[left, last], number[last, self.stage[pair]]
        self.apart_used, self.apart_stage = self.used, self.stage
        self.apart_later = self.later
        self.side = np.full(len(self.used), UNKNOWN)
        self.is_split = np.zeros(len(self.used), dtype=bool)
        self.changes = np.zeros(len(self.way), dtype=bool)
        if len(sizes) == 2:
            self._tell_sides_apart()

    def _tell_sides_apart(self) -> None:
        """Have three pairs instead of one whose stage is split over both classes, by side."""
        on = self.rows[self.stage] > 0
        split = np.flatnonzero(on.all(axis=1))
        old, count = self.later[self.way], len(self.used)
        # A pair that is split keeps its number with side 0; the others follow behind all pairs.
        number = np.tile(np.arange(count), (3, 1))
        number[1:, split] = count + np.arange(2 * len(split)).reshape(2, -1)
        self.side = np.where(on[:, 0], 0, 1)
        self.side = np.concatenate([self.side, np.repeat([1, UNKNOWN], len(split))])
        self.is_split = np.concatenate([on.all(axis=1), np.ones(2 * len(split), dtype=bool)])
        came: list[IntArray] = []
        went: list[IntArray] = []
        between: list[IntArray] = []
        for side in range(3):
            rows = np.arange(len(old))
            if side:
                rows = np.flatnonzero(on[self.before].all(axis=1))
            before = number[side, self.before[rows]]
            after = number[self.side[before], old[rows]]
            came, went = [*came, before], [*went, after]
            between = [*between, self.between[rows]]
        order = np.argsort(np.concatenate(went), kind="stable")
        self.before, after = np.concatenate(came)[order], np.concatenate(went)[order]
        self.between = np.concatenate(between)[order]
        extend = np.concatenate([np.arange(count), np.tile(split, 2)])
        self.used, self.option = self.used[extend], self.option[extend]
        self.stage = self.stage[extend]
        is_first = (self.used == 0) & (~self.is_split | (self.side == UNKNOWN))
        self.first, self.later = np.flatnonzero(is_first), np.flatnonzero(self.used)
        self.way = np.searchsorted(self.later, after)
        one, other = self.side[self.before], self.side[after]
        self.changes = (one != other) & (one != UNKNOWN) & ~self.is_split[after]

    def _ways(self) -> tuple[IntArray, IntArray]:
        """Return, for each later pair, its place and each vector that the stage before may have."""
        used, options = self.rows[self.used[self.later]], self.rows[self.options]
        chunk = max(1, int(MOST_STEPS) // options.size)
        places, lasts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(used), chunk):
            within = (options[None] <= used[begin : begin + chunk, None]).all(axis=2)
            which, option = np.nonzero(within)
            places.append(begin + which)
            lasts.append(self.options[option])
        return np.concatenate(places), np.concatenate(lasts)
