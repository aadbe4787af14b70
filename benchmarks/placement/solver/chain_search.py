"""The best chain of ideals in a family: exact if the family holds every ideal.

The recursion is the dynamic program of Tarnawski et al. 2020, section 4: the least largest load of
an ideal on so many devices of each class is the least, over the ideals inside it, of what was
there before and the load of the difference. New here: only loads below a limit count, ideals that
hold more than their devices can do, or leave more than the others can, are left out, and pairs
of ideals are taken in blocks as matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.bounds import Prices, best_prices
from benchmarks.placement.solver.ideals import Family
from benchmarks.placement.solver.pair_loads import PairLoads, Rows, Steps, row_sums
from planner.search.budget import Clock

COLUMNS = 128
MOST_TABLES = 4000
SECONDS_PER_PAIR = 5e-8
"""Deterministic time booked for one pair of ideals."""
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A contiguous split.

    Attributes:
        value: its largest load in steps.
        stages: the class of each stage and the blocks in it, in order; empty stages left out.
    """

    value: int
    stages: tuple[tuple[int, NDArray[np.bool_]], ...]

    def devices(self, blocks: Blocks) -> list[int]:
        """The device of every block; devices are numbered class by class."""
        starts = np.cumsum([0, *(kind.count for kind in blocks.classes)])
        used = [0] * len(blocks.classes)
        device = [0] * blocks.size
        for number, stage in self.stages:
            for block in np.flatnonzero(stage):
                device[block] = int(starts[number]) + used[number]
            used[number] += 1
        return device


def is_searchable(blocks: Blocks) -> bool:
    """Return whether the dynamic program's tables are small enough."""
    return prod(kind.count + 1 for kind in blocks.classes) <= MOST_TABLES


def best_chain(blocks: Blocks, family: Family, below: int, clock: Clock) -> Chain | None:
    """The split with the least largest load, of those with loads below a limit.

    Args:
        blocks: the problem.
        family: the ideals stages may end at; the empty one and that of all blocks are among them.
        below: loads, in steps, must be less.
        clock: stops the search.

    Returns:
        The best split, or None if there is none.

    Raises:
        TimeoutError: if the clock ran out first.
    """
    return _Search(blocks, family, below - 1).run(clock)


class _Search:
    """Tables of one search; ``_best[counts][ideal]`` is the recursion's value."""

    def __init__(self, blocks: Blocks, family: Family, most: int) -> None:
        self._blocks, self._most = blocks, most
        self._full: Counts = tuple(kind.count for kind in blocks.classes)
        self._counts = list(product(*(range(count + 1) for count in self._full)))
        prices = best_prices(blocks)
        self._order_family(family, prices)
        self._stage_budget = max(prices.budget(one, most) for one in self._singles())
        self._keep(self._windows(prices, None))
        self._loads = PairLoads(blocks, self._family)
        self._keep(self._windows(prices, self._loads.cut))
        self._loads = PairLoads(blocks, self._family)
        self._best = {counts: np.full(len(self._family), np.inf) for counts in self._counts}

    def _order_family(self, family: Family, prices: Prices) -> None:
        """Sort so that parts come before the whole."""
        weights = row_sums(family, prices.weights)
        order = np.lexsort((family.sum(axis=1), weights))
        self._family, self._weights = family[order], weights[order]
        self._total = int(prices.weights.sum())

    def _singles(self) -> Iterator[Counts]:
        for number in range(len(self._full)):
            yield tuple(int(number == other) for other in range(len(self._full)))

    def _keep(self, may: dict[Counts, NDArray[np.bool_]]) -> None:
        """Leave out the ideals that no devices may hold."""
        rows = np.logical_or.reduce(list(may.values()))
        self._family, self._weights = self._family[rows], self._weights[rows]
        self._may = {counts: allowed[rows] for counts, allowed in may.items()}

    def _windows(self, prices: Prices, cut: Steps | None) -> dict[Counts, NDArray[np.bool_]]:
        """Return ideals that given devices can hold while the others can hold the rest, by counts.

        Args:
            prices: of the classes' time, see :class:`Prices`.
            cut: by ideal, the cost of the nets across its border; None to leave it out.
        """
        windows = {}
        for counts in self._counts:
            rest = tuple(all_ - used for all_, used in zip(self._full, counts, strict=True))
            inside = self._weights + self._border(counts, prices, cut)
            outside = self._total - self._weights + self._border(rest, prices, cut)
            windows[counts] = (inside <= prices.budget(counts, self._most)) & (
                outside <= prices.budget(rest, self._most)
            )
        return windows

    def _border(self, counts: Counts, prices: Prices, cut: Steps | None) -> NDArray[np.int64] | int:
        """Return the least payment of given devices for the nets across an ideal's border."""
        kinds = self._blocks.classes
        present = [number for number, count in enumerate(counts) if count]
        if cut is None or not present or not all(kinds[n].pays_transfers for n in present):
            return 0
        return cut.astype(np.int64) * min(prices.of_class[number] for number in present)

    def run(self, clock: Clock) -> Chain | None:
        if not len(self._family) or self._family[0].any() or not self._family[-1].all():
            return None  # No devices can hold nothing, or everything: the limit is too low.
        for counts in self._counts:
            self._best[counts][0] = 0
        for start in range(1, len(self._family), COLUMNS):
            if clock.left_s <= 0:
                raise TimeoutError
            pairs = self._fill(np.arange(start, min(start + COLUMNS, len(self._family))))
            clock.spend(pairs * SECONDS_PER_PAIR)
        value = self._best[self._full][-1]
        return Chain(int(value), self._stages()) if np.isfinite(value) else None

    def _fill(self, upper: Rows) -> int:
        """Fill the columns of some ideals; returns how many pairs that took."""
        lower = self._below(upper)
        loads = self._loads.between(lower, upper)
        for load in loads:
            load[load > self._most] = np.inf
        for counts in self._counts:
            columns = np.flatnonzero(self._may[counts][upper])
            if len(columns):
                best = self._best[counts]
                found = self._from_fewer(counts, lower, loads, columns, upper[columns])
                best[upper[columns]] = np.minimum(best[upper[columns]], found)
        return len(lower) * len(upper)

    def _below(self, upper: Rows) -> Rows:
        """The ideals a stage up to one of these may start at."""
        least = self._weights[upper[0]] - self._stage_budget
        first = int(np.searchsorted(self._weights, least))
        rows = np.arange(first, upper[-1] + 1)
        reached = np.logical_or.reduce([np.isfinite(best[rows]) for best in self._best.values()])
        below: Rows = rows[reached | (rows >= upper[0])]
        return below

    def _from_fewer(
        self, counts: Counts, lower: Rows, loads: list[Steps], columns: Rows, upper: Rows
    ) -> Steps:
        """The recursion: the last stage on a device of each class, or on none."""
        found = np.full(len(columns), np.inf)
        for number, count in enumerate(counts):
            if not count:
                continue
            before = self._best[_less(counts, number)]
            found = np.minimum(found, before[upper])
            rows = np.flatnonzero(np.isfinite(before[lower]))
            if len(rows):
                last = loads[number][np.ix_(rows, columns)]
                whole = np.maximum(before[lower[rows]][:, None], last)
                found = np.minimum(found, whole.min(axis=0))
        return found

    def _stages(self) -> tuple[tuple[int, NDArray[np.bool_]], ...]:
        stages = []
        upper, counts = len(self._family) - 1, self._full
        while upper > 0:
            number, lower = self._last_stage(upper, counts)
            if lower != upper:
                stages.append((number, self._family[upper] & ~self._family[lower]))
            upper, counts = lower, _less(counts, number)
        return tuple(reversed(stages))

    def _last_stage(self, upper: int, counts: Counts) -> tuple[int, int]:
        """The class of the last stage and the ideal before it, for a value in the tables."""
        value = self._best[counts][upper]
        lower = np.arange(upper + 1)
        loads = self._loads.between(lower, np.array([upper]))
        for number in np.flatnonzero(counts):
            before = self._best[_less(counts, int(number))]
            if before[upper] == value:
                return int(number), upper
            whole = np.maximum(before[lower], loads[number][:, 0])
            if whole.min() == value:
                return int(number), int(whole.argmin())
        raise AssertionError("no stage gives the value of the table")


def _less(counts: Counts, number: int) -> Counts:
    return tuple(count - (index == number) for index, count in enumerate(counts))
