"""Local searches by bounds: of partitions (polishing, annealing) and of orders of the devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from planner.search.budget import Clock, SearchWork
from planner.search.partition.bounds.quick import Numbered, PartitionScorer, Score
from planner.search.partition.chain import FloatArray, Partition
from planner.search.partition.dynamic_programs.order_program import Order, OrderProgram, least_s
from planner.search.partition.local_search.loop import (
    Acceptance,
    AnnealingAcceptance,
    Cooling,
    GreedyAcceptance,
    local_search,
)
from planner.search.partition.local_search.neighbourhood import MoveShares, PartitionMoves

PATIENCE = 4000
"""Changes in a row without any improvement after which polishing ends."""
CHANGES = 40_000
"""Changes of one annealing walk."""
COOLING = Cooling(hottest=0.01, coolest=2e-4)
SHIFTS = MoveShares(shift=1, exchange=1, merge=1, split=1, drop=1)
"""Moves of boundaries alone."""
ANNEALING_SHARES = MoveShares(shift=0.35, exchange=0.7, merge=0.75, split=0.8, drop=0.85)


class _QuickSearch:
    """What polishing and annealing share.

    Args:
        quick: scores partitions; its cuts are the ones stages may end at.
        clock: deterministic time is booked on it.
        seed: of the changes.
    """

    def __init__(self, quick: PartitionScorer, clock: Clock, seed: int) -> None:
        self._quick = quick
        self._clock = clock
        self._random = random.Random(seed)
        self._moves = PartitionMoves(quick, self._random)

    def _improvements(
        self,
        start: Partition,
        draw: Callable[[Numbered, Score], Numbered | None],
        acceptance: Acceptance[Score],
    ) -> Iterator[Partition]:
        """Yield better and better partitions; the first is better than ``start``."""
        first = self._quick.numbered(start)
        if first is None:
            return
        judge = self._quick.score
        best_s = judge(first).bound_s
        for stages, score in local_search(first, judge(first), draw, judge, acceptance):
            if score.bound_s < best_s * (1 - 1e-9):
                best_s = score.bound_s
                yield self._quick.named(stages)


class Polish(_QuickSearch):
    """Random small changes; those that lower the bound, or else the excess, are kept."""

    def improve(self, start: Partition, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Yield better and better partitions; the first is better than ``start``."""
        acceptance = GreedyAcceptance[Score](lambda score: score[:2], PATIENCE, may_go_on)
        return self._improvements(start, self._draw, acceptance)

    def _draw(self, stages: Numbered, score: Score) -> Numbered | None:
        """Return one random change, mostly at the stage that sets the bound."""
        self._clock.charge(SearchWork.QUICK_BOUND)
        place = score.critical
        if self._random.random() < 0.3:
            place = self._random.randrange(len(stages))
        kind = self._random.random()
        if kind < 0.4:
            return self._moves.shift(stages, place)
        if kind < 0.7 and self._moves.replication:
            return self._moves.hand_over(stages, place)
        return self._moves.exchange(stages, place)


class Anneal(_QuickSearch):
    """One walk that cools down with the number of its steps: it finds what polishing does not.

    Args:
        quick: scores partitions; its cuts are the ones stages may end at.
        max_stages: the largest number of stages.
        clock: deterministic time is booked on it.
        seed: of the changes.
        shares: of the kinds of change.
        changes: how many the walk has.
    """

    def __init__(
        self,
        quick: PartitionScorer,
        max_stages: int,
        clock: Clock,
        seed: int,
        shares: MoveShares = ANNEALING_SHARES,
        changes: int = CHANGES,
    ) -> None:
        super().__init__(quick, clock, seed)
        self._max_stages = max_stages
        self._shares = shares
        self._changes = changes

    def improve(self, start: Partition, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Yield better and better partitions; the first is better than ``start``."""
        steps = count()
        acceptance = AnnealingAcceptance[Score](
            COOLING,
            lambda score: score.bound_s,
            lambda: next(steps) / self._changes,
            may_go_on,
            self._random,
        )
        return self._improvements(start, self._draw, acceptance)

    def _draw(self, stages: Numbered, score: Score) -> Numbered | None:
        """Return one random change, every other one at the stage that sets the bound."""
        self._clock.charge(SearchWork.QUICK_BOUND)
        place, kind = score.critical, self._random.random()
        if self._random.random() < 0.5 or place >= len(stages):
            place = self._random.randrange(len(stages))
        changed = self._moves.draw(stages, place, kind, self._shares)
        return None if changed is None or len(changed) > self._max_stages else changed


IMPROVEMENT = 1e-4
"""The least relative improvement looked for."""
ORDER_PATIENCE = 100
"""Changes in a row without any improvement, for each device of the order, after which it ends."""
Rank = tuple[int, float]
"""How far an order comes within the limit, and how quickly: more is better."""
ChangedOrder = tuple[Order, int]
"""An order and the first place where it differs from the one before."""


class _JudgedOrder(NamedTuple):
    """An order's table of the program, its rank, and the partition if it lowers the limit."""

    table: FloatArray
    rank: Rank
    partition: Partition | None = None
    is_better: bool = False


class OrderSearch:
    """Improves an order step by step.

    Args:
        program: judges orders.
        order: where to start.
        bound_s: no plan is faster.
        clock: deterministic time is booked on it.
        seed: of the moves.
    """

    def __init__(
        self, program: OrderProgram, order: Order, bound_s: float, clock: Clock, seed: int
    ) -> None:
        self._program = program
        self._clock = clock
        self._random = random.Random(seed)
        self.bound_s = bound_s
        self.order = order
        self.limit_s = np.inf
        self.failures = 0
        self._current: _JudgedOrder | None = None

    def start(
        self,
        high_s: float,
        tolerance: float = IMPROVEMENT,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Partition | None:
        """Return the partition along the first order, if it has any within ``high_s``.

        The best one (to the tolerance) unless time runs out: then one that was found until then.
        """
        found = self._program.least_limit_s(self.order, self.bound_s, high_s, tolerance, may_go_on)
        self._spend(12 * len(self.order))
        if found is None:
            return None
        self._current = self._settle(self.order, found)
        return self._current.partition

    def improve(self, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Yield better and better partitions, until time is up or the bound is met."""
        if self._current is None:
            return
        judge = partial(self._judge, may_go_on)
        acceptance = _OrderAcceptance(self, may_go_on)
        start = self.order, 0
        for (order, _), found in local_search(start, self._current, self._draw, judge, acceptance):
            self.order, self._current = order, found
            if found.partition is not None:
                yield found.partition

    @property
    def is_finished(self) -> bool:
        """Whether the bound is met, or nothing better is to be expected."""
        patience = ORDER_PATIENCE * (len(self.order) + 10)
        met = self._target_s <= self.bound_s
        return met or len(self.order) < 2 or self.failures > patience

    @property
    def _target_s(self) -> float:
        return self.limit_s * (1 - IMPROVEMENT)

    def _judge(self, may_go_on: Callable[[], bool], changed: ChangedOrder) -> _JudgedOrder:
        """Return the rank of an order, and its best partition if it lowers the limit."""
        order, first = changed
        assert self._current is not None
        table = self._program.reach(order, self._target_s, self._current.table[: first + 1])
        self._spend(len(order) - first)
        if least_s(table) > self._target_s:
            return _JudgedOrder(table, _rank(table))
        found = self._program.least_limit_s(
            order, self.bound_s, self._target_s, may_go_on=may_go_on
        )
        self._spend(8 * len(order))
        return self._settle(order, found or self._target_s)

    def _settle(self, order: Order, limit_s: float) -> _JudgedOrder:
        """Take over a lower limit and look for less from now on."""
        partition = self._program.partition(order, limit_s)
        self.limit_s, self.failures = limit_s, 0
        table = self._program.reach(order, self._target_s)
        return _JudgedOrder(table, _rank(table), partition, is_better=True)

    def _draw(self, current: ChangedOrder, _: _JudgedOrder) -> ChangedOrder:
        """Return another order and the first place where it differs."""
        order = list(current[0])
        first, last = sorted(self._random.sample(range(len(order)), 2))
        kind = self._random.random()
        if kind < 0.4:
            order[first], order[last] = order[last], order[first]
        elif kind < 0.7:
            order[first : last + 1] = reversed(order[first : last + 1])
        elif kind < 0.85:
            order.insert(first, order.pop(last))
        else:
            order.insert(last, order.pop(first))
        return tuple(order), first

    def _spend(self, rows: int) -> None:
        self._clock.charge(SearchWork.ORDER_PROGRAM_ROW, rows)


class _OrderAcceptance:
    """Accept orders that lower the limit or come no less far within it."""

    def __init__(self, search: OrderSearch, may_go_on: Callable[[], bool]) -> None:
        self._search = search
        self._may_go_on = may_go_on

    def goes_on(self, score: _JudgedOrder) -> bool:
        """Return whether the search is not finished and there is time."""
        if self._search.is_finished or not self._may_go_on():
            return False
        self._search.failures += 1
        return True

    def accepts(self, found: _JudgedOrder, score: _JudgedOrder) -> bool:
        """Return whether the order is better, or ranks no lower."""
        return found.is_better or found.rank >= score.rank


def _rank(table: FloatArray) -> Rank:
    best: Rank = (0, 0.0)
    for row in table:
        reached = np.flatnonzero(np.isfinite(row[0]))
        if len(reached):
            best = max(best, (int(reached[-1]), -float(row[0, reached[-1]])))
    return best
