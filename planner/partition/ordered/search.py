"""Local search over device orders: swap, reverse and move devices, judged by the program."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.partition.chain import Partition
from planner.partition.ordered.program import Order, OrderProgram, Row
from planner.solver_settings import Clock

IMPROVEMENT = 1e-4
"""The least relative improvement looked for."""
PATIENCE = 100
"""Changes in a row without any improvement, for each device of the order, after which it ends."""
SECONDS_A_ROW = 5e-5
"""What one row of the program counts in deterministic time."""
Score = tuple[int, float]


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
        self.tried = 0
        self._failures = 0
        self._rows: list[Row] = []
        self._score: Score = (0, 0.0)

    def start(
        self,
        high_s: float,
        tolerance: float = IMPROVEMENT,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Partition | None:
        """The partition along the first order, if it has any within ``high_s``.

        The best one (to the tolerance) unless time runs out: then one that was found until then.
        """
        found = self._program.least_limit_s(self.order, self.bound_s, high_s, tolerance, may_go_on)
        self._spend(12 * len(self.order))
        if found is None:
            return None
        return self._accept(self.order, found)

    def improve(self, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Better and better partitions, until time is up or the bound is met."""
        while not self.is_finished and may_go_on():
            self._failures += 1
            order, first = self._neighbour()
            if first >= len(self._rows):
                self._spend(1)
                continue
            rows = self._program.reach(order, self._target_s, self._rows[: first + 1])
            self.tried += 1
            self._spend(len(order) - first)
            if self._program.time_s(rows) <= self._target_s:
                found = self._program.least_limit_s(
                    order, self.bound_s, self._target_s, may_go_on=may_go_on
                )
                self._spend(8 * len(order))
                partition = self._accept(order, found or self._target_s)
                if partition is not None:
                    yield partition
            elif _score(rows) >= self._score:
                self.order, self._rows, self._score = order, rows, _score(rows)

    @property
    def is_finished(self) -> bool:
        """Whether the bound is met, or nothing better is to be expected."""
        patience = PATIENCE * (len(self.order) + 10)
        met = self._target_s <= self.bound_s
        return met or len(self.order) < 2 or self._failures > patience

    @property
    def _target_s(self) -> float:
        return self.limit_s * (1 - IMPROVEMENT)

    def _accept(self, order: Order, limit_s: float) -> Partition | None:
        partition = self._program.partition(order, limit_s)
        self.order, self.limit_s, self._failures = order, limit_s, 0
        self._rows = self._program.reach(order, self._target_s)
        self._score = _score(self._rows)
        return partition

    def _neighbour(self) -> tuple[Order, int]:
        """Another order and the first place where it differs."""
        first, last = sorted(self._random.sample(range(len(self.order)), 2))
        order = list(self.order)
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
        self._clock.spend(SECONDS_A_ROW * rows)


def _score(rows: Sequence[Row]) -> Score:
    """How far an order comes within the limit, and how quickly: more is better."""
    best: Score = (0, 0.0)
    for row in rows:
        reached = np.flatnonzero(np.isfinite(row[0]))
        if len(reached):
            best = max(best, (int(reached[-1]), -float(row[0, reached[-1]])))
    return best
