"""The states of the checker's program: how many devices of each class are in use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from planner.errors import PipeplanError

MOST_VECTORS = 2_000
MOST_PAIRS = 4e6
"""Vectors of devices, and pairs of them times vectors, that are looked at."""
UNKNOWN = 2
"""The side where no stage was on one class alone."""


class Vectors:
    """Numbers of devices by class: those used before a stage, of the stage, of the one before.

    A state is a pair: a vector used before a stage and one of the stage. Where there are two
    classes, it also has a side: the class that the last stage on one class alone was on, if one
    was. A way leads from a stage's pair to that of the next stage.

    Args:
        sizes: of the classes.
        replication: whether a stage may have several devices.

    Attributes:
        rows: all vectors; the first is empty, and they are numbered so that numbers add.
        options: numbers of those on which a stage may lie.
        apart_used, apart_stage: numbers of vectors, for every two that leave each other devices.
        used, stage: numbers of vectors, by pair.
        option: the place of the second among the options.
        side: as above; :data:`UNKNOWN` if no stage was.
        is_split: by pair, whether its stage is on both of two classes.
        first: numbers of the pairs before which nothing is used.
        before, after: pairs, by way; ways are in the order of the latter.
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
        number = self.rows.sum(axis=1)
        self.options = np.flatnonzero((number > 0) & (replication | (number == 1)))
        options = self.rows[self.options]
        fits = [np.flatnonzero((options + row <= sizes).all(axis=1)) for row in self.rows]
        self.apart_used = np.repeat(np.arange(count), [len(row) for row in fits])
        self.apart_stage = self.options[np.concatenate(fits)]
        on = self.rows[self.apart_stage] > 0
        split = np.asarray(on.all(axis=1) & (len(sizes) == 2))
        # One that is split is a state for each side.
        pair = np.repeat(np.arange(len(on)), np.where(split, UNKNOWN + 1, 1))
        place = np.arange(len(pair)) - np.searchsorted(pair, pair)
        alone = on.argmax(axis=1) if len(sizes) == 2 else np.full(len(on), UNKNOWN)
        self.used, self.stage = self.apart_used[pair], self.apart_stage[pair]
        self.is_split = split[pair]
        self.side = np.where(self.is_split, place, alone[pair])
        self.option = np.searchsorted(self.options, self.stage)
        no_side = ~self.is_split | (self.side == UNKNOWN)
        self.first = np.flatnonzero((self.used == 0) & no_side)
        self._find_ways(count)

    def _find_ways(self, count: int) -> None:
        """Find every pair of a next stage that may follow each pair; pairs are in order of used."""
        used = self.used + self.stage
        begin, end = (np.searchsorted(self.used, used, side=s) for s in ("left", "right"))
        before = np.repeat(np.arange(len(used)), end - begin)
        first = np.cumsum(end - begin) - (end - begin)
        after = np.arange(len(before)) - first[before] + begin[before]
        keeps = ~self.is_split[after] | (self.side[after] == self.side[before])
        order = np.flatnonzero(keeps)[np.argsort(after[keeps], kind="stable")]
        self.before, self.after = before[order], after[order]
        apart = self.apart_used * count + self.apart_stage
        self.between = np.searchsorted(
            apart, self.stage[self.before] * count + self.stage[self.after]
        )
        one, other = self.side[self.before], self.side[self.after]
        self.changes = (one != other) & (one != UNKNOWN) & ~self.is_split[self.after]
