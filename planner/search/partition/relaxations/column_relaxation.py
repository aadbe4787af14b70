"""A bound on every plan with any number of stages a device: can devices cover all the layers?

A column is what one device may hold and finish within a limit: runs of layers, each for a number of
microbatches. A plan is a column for each device, which together give every layer all microbatches.
Let each layer pay a price for a microbatch. If all layers pay more than the devices can earn, each
with the best column of its kind, no plan keeps the limit; any prices prove that (weak duality). The
best prices are those of a linear program whose rows, the columns, are made as they are needed
(Gilmore and Gomory 1961, "A linear programming approach to the cutting-stock problem").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cluster.link_table import FloatArray, IntArray, LinkTable
from planner.search.budget import Clock, SearchWork
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain
from planner.search.partition.dynamic_programs.core import ROUNDING, ruled_out_s
from planner.search.partition.relaxations.column_figures import ColumnFigures, DeviceColumn
from planner.search.partition.relaxations.column_knapsack import ColumnKnapsack
from planner.search.partition.relaxations.column_pairs import (
    ColumnPairs,
    interval_pairs,
    pair_count,
)

DECIMALS = 4
"""Decimals of prices, which are rounded before they have to prove anything."""
LEAST_STEPS, MOST_STEPS = 400, 4000
"""Steps of the grid of loads."""
MOST_CELLS = 2e7
"""States of all knapsacks together, beyond which the grid is made coarser."""
MOST_ROUNDS = 60
"""Rounds of new columns for one limit."""
SAME, LEAST_LEFT = 1e-9, 1e-7
"""A column is new if it earns that much more; less than that left over proves nothing."""


@dataclass(frozen=True)
class ColumnProof:
    """What proves that no plan is faster: prices that no devices can earn within a limit.

    Attributes:
        limit_s: no plan takes less.
        prices: that each layer pays for a microbatch, in the order of the chain.
        steps: of the grid to which loads are rounded down, for the whole limit; 0 where all pairs
            of stages are looked at instead, with exact loads.
        most_stages: that a device may hold.
    """

    limit_s: float
    prices: tuple[float, ...]
    steps: int
    most_stages: int


class ColumnPricing(Protocol):
    """The columns that keep one limit."""

    @property
    def cells(self) -> int:
        """States that a look for the best columns goes through."""

    def best(self, prices: FloatArray) -> list[DeviceColumn]:
        """Return columns, among them one of most value for each kind of device."""

    def holds(self, column: DeviceColumn) -> bool:
        """Return whether a column found for another limit keeps this one too."""


class ColumnRelaxation:
    """The relaxation of one problem.

    With replicas and two stages a device all pairs of stages are looked at, if they are few enough:
    that counts reductions and ports too. Otherwise the columns are those of a knapsack.

    Args:
        chain: the layers.
        links: of the cluster.
        clock: is charged with the states that are gone through.

    Attributes:
        proof: of the highest bound found; None before the first.
    """

    def __init__(self, chain: Chain, links: LinkTable, clock: Clock) -> None:
        self._chain = chain
        self._clock = clock
        self._most_stages = min(chain.problem.job.max_stages_per_device, chain.length)
        self._figures = ColumnFigures(chain, links)
        self._columns: list[DeviceColumn] = []
        self._pairs = self._few_pairs()
        self._steps = 0 if self._pairs is not None else self._grid_steps()
        self.proof: ColumnProof | None = None

    def _few_pairs(self) -> IntArray | None:
        """Return all pairs of stages, if they are what a device may hold and few enough."""
        figures = self._figures
        if not figures.replication or self._most_stages != 2:
            return None
        cells = pair_count(figures.length) * figures.microbatches * figures.kinds
        return interval_pairs(figures.length) if cells <= MOST_CELLS else None

    def _grid_steps(self) -> int:
        figures = self._figures
        rows = figures.kinds * len(figures.shares) * figures.length * (2 * self._most_stages + 1)
        return int(min(MOST_STEPS, MOST_CELLS / rows))

    @property
    def is_tractable(self) -> bool:
        """Whether the pairs are few enough, or a grid fine enough is small enough."""
        return self._pairs is not None or self._steps >= LEAST_STEPS

    def bound_s(
        self,
        known_s: float,
        tolerance: float = 5e-4,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """Return a time that no plan beats, not more than that of a known plan.

        Args:
            known_s: iteration time of any plan, or any valid time limit.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """

        def keeps(limit_s: float) -> bool:
            return not self._is_ruled_out(limit_s, may_go_on)

        return ruled_out_s(keeps, work_bound_s(self._chain), known_s, tolerance, may_go_on)

    def _pricing(self, limit_s: float) -> ColumnPricing:
        if self._pairs is not None:
            return ColumnPairs(self._figures, limit_s, self._pairs)
        return ColumnKnapsack(self._figures, limit_s, self._steps, self._most_stages)

    def _is_ruled_out(self, limit_s: float, may_go_on: Callable[[], bool]) -> bool:
        """Return whether prices were found that prove that no plan keeps a limit."""
        pricing = self._pricing(limit_s)
        master = _Master(self._figures, [c for c in self._columns if pricing.holds(c)])
        for _ in range(MOST_ROUNDS):
            prices = master.prices()
            if prices is None or not may_go_on():
                return False
            self._clock.charge(SearchWork.COLUMN_STATE, pricing.cells)
            columns = pricing.best(prices)
            if self._is_proved(prices, columns):
                self._keep(limit_s, prices)
                return True
            new = [c for c in columns if c.value > master.earned(c.kind) + SAME]
            if not new:
                return False
            self._columns += new
            master.add(new)
        return False

    def _is_proved(self, prices: FloatArray, columns: Sequence[DeviceColumn]) -> bool:
        """Return whether all layers pay more than all devices can earn."""
        most = np.zeros(self._figures.kinds)
        for column in columns:
            most[column.kind] = max(most[column.kind], column.value)
        paid = self._figures.microbatches * float(prices.sum())
        return paid > float(self._figures.counts @ most) * ROUNDING

    def _keep(self, limit_s: float, prices: FloatArray) -> None:
        if self.proof is None or limit_s > self.proof.limit_s:
            rounded = tuple(round(float(price), DECIMALS) for price in prices)
            self.proof = ColumnProof(limit_s, rounded, self._steps, self._most_stages)


class _Master:
    """The linear program: the prices with the most that layers pay beyond what devices earn.

    Args:
        figures: of layers and devices.
        columns: that devices may have, to begin with.
    """

    def __init__(self, figures: ColumnFigures, columns: list[DeviceColumn]) -> None:
        from ortools.linear_solver import pywraplp

        self._figures = figures
        self._optimal = pywraplp.Solver.OPTIMAL
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._price = [self._solver.NumVar(0, 1, "") for _ in range(figures.length)]
        infinity = self._solver.infinity()
        self._earned = [self._solver.NumVar(0, infinity, "") for _ in range(figures.kinds)]
        paid = figures.microbatches * sum(self._price)
        counts = zip(figures.counts, self._earned, strict=True)
        self._solver.Maximize(paid - sum(float(count) * earned for count, earned in counts))
        self.add(columns)

    def add(self, columns: list[DeviceColumn]) -> None:
        """Let every kind earn at least as much as its columns."""
        for column in columns:
            row = self._solver.Constraint(-self._solver.infinity(), 0.0)
            row.SetCoefficient(self._earned[column.kind], -1.0)
            for layer in np.flatnonzero(column.taken):
                row.SetCoefficient(self._price[layer], float(column.taken[layer]))

    def prices(self) -> FloatArray | None:
        """Return the best prices, rounded; None if devices always earn all that layers pay."""
        status = self._solver.Solve()
        if status != self._optimal or self._solver.Objective().Value() <= LEAST_LEFT:
            return None
        return np.array([round(price.solution_value(), DECIMALS) for price in self._price])

    def earned(self, kind: int) -> float:
        """Return what a device of a kind earns by the best prices."""
        return float(self._earned[kind].solution_value())
