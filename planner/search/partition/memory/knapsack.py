"""The minimum knapsack: items that save enough, at the least total cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MOST_STATES = 20_000
"""Partial choices kept at a time; real layers need hundreds, contrived ones may need more."""
TOLERANCE = 1e-6
"""Relative tolerance of the cost: a millionth less is not looked for."""


@dataclass(frozen=True)
class Cover:
    """Chosen items, ascending, and their cost.

    ``is_least``: no choice is cheaper by more than TOLERANCE; false if states had to be dropped.
    """

    items: tuple[int, ...]
    cost: float
    is_least: bool = True


@dataclass(frozen=True)
class _States:
    """Partial choices: what they cost and save, and how each was made from one before it."""

    cost: FloatArray
    saved: IntArray
    parent: IntArray
    taken: NDArray[np.bool_]


def cheapest_cover(cost: FloatArray, saving: IntArray, need: int) -> Cover | None:
    """Return items whose savings sum to ``need`` or more, at least cost; None if all are too few.

    Nemhauser and Ullmann's lists of undominated partial choices (1969, "Discrete dynamic
    programming and capital allocation"), the cheapest savings first, cut off by the fractional
    (Dantzig) bound against the best greedy completion.

    Args:
        cost: of each item, at least 0.
        saving: of each item, whole; items that save nothing are never chosen.
        need: to be saved.
    """
    useful = np.flatnonzero(saving > 0)
    if need <= 0:
        return Cover((), 0.0)
    if int(saving[useful].sum()) < need:
        return None
    ratio = cost[useful] / saving[useful]
    order = useful[np.argsort(ratio, kind="stable")]
    return _Search(cost[order], saving[order], need).run(order)


class _Search:
    """Items in order of cost a unit saved."""

    def __init__(self, cost: FloatArray, saving: IntArray, need: int) -> None:
        self.cost, self.saving, self.need = cost, saving, need
        self.costs = np.concatenate([[0.0], np.cumsum(cost)])
        self.savings = np.concatenate([[0], np.cumsum(saving)])
        self.levels: list[_States] = []
        self.best = np.inf
        self.best_at = (0, 0, 0)
        self.is_least = True

    def run(self, order: IntArray) -> Cover:
        states = _States(
            np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, bool)
        )
        self.levels.append(states)
        for item in range(len(order)):
            keep = self._promising(item)
            if not len(keep):
                break
            self.levels.append(self._extend(item, keep))
        return Cover(self._items(order), self.best, self.is_least)

    def _promising(self, item: int) -> IntArray:
        """States that may still lead to something better; notes the best way to complete one."""
        states = self.levels[-1]
        target = self.savings[item] + self.need - states.saved
        # After items[item:end] enough is saved: the greedy completion.
        end = np.searchsorted(self.savings, target, side="left")
        can = end < len(self.savings)
        end = np.where(can, np.maximum(end, item), item)
        greedy = np.where(can, states.cost + self.costs[end] - self.costs[item], np.inf)
        first = int(greedy.argmin())
        if greedy[first] < self.best:
            self.best, self.best_at = float(greedy[first]), (item, first, int(end[first]))
        last = np.maximum(end - 1, 0)
        excess = np.where(end > item, self.savings[end] - target, 0)
        bound = greedy - excess * (self.cost[last] / self.saving[last])
        keep = np.flatnonzero(can & (bound < self.best * (1 - TOLERANCE)))
        if len(keep) > MOST_STATES:
            self.is_least = False
            keep = keep[np.argsort(bound[keep], kind="stable")[:MOST_STATES]]
        return keep

    def _extend(self, item: int, keep: IntArray) -> _States:
        """Each state without and with the item; what costs more and saves no more is dropped."""
        before = self.levels[-1]
        cost = np.concatenate([before.cost[keep], before.cost[keep] + self.cost[item]])
        saved = np.concatenate([before.saved[keep], before.saved[keep] + self.saving[item]])
        taken = np.repeat([False, True], len(keep))
        order = np.lexsort((cost, -saved))
        cheaper = np.minimum.accumulate(cost[order])
        undominated = np.concatenate([[True], cheaper[1:] < cheaper[:-1]])
        chosen = order[undominated]
        return _States(cost[chosen], saved[chosen], np.tile(keep, 2)[chosen], taken[chosen])

    def _items(self, order: IntArray) -> tuple[int, ...]:
        level, state, end = self.best_at
        items = list(range(level, end))
        for item in range(level, 0, -1):
            states = self.levels[item]
            if states.taken[state]:
                items.append(item - 1)
            state = int(states.parent[state])
        return tuple(sorted(int(order[item]) for item in items))
