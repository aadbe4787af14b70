"""Prices for certificates, by linear programs: any prices prove something, these prove most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp

from planner.bounds.layers import FloatArray, IntArray

DIGITS = 6
"""Significant digits of prices of devices; prices of layers, of which the largest is about 1, have
as many decimals."""
LEAST_LEFT = 1e-7
"""Less than that left over proves nothing."""


def work_prices(seconds: FloatArray, may_run: FloatArray, counts: FloatArray) -> FloatArray:
    """Return the prices of a second on each type of device that bound the total work best.

    Each layer is paid at its cheapest type, all devices together cost 1:

        maximise sum over layers of min over types of price * seconds

    Args:
        seconds: (K, N) of all work of a layer on each type.
        may_run: (K, N) whether a type may run a layer.
        counts: (K) devices.
    """
    if len(counts) == 1:
        return np.ones(1)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = float(seconds.max()) or 1.0
    prices = [solver.NumVar(0, solver.infinity(), "") for _ in counts]
    paid = [solver.NumVar(0, solver.infinity(), "") for _ in seconds[0]]
    for layer, row in enumerate(paid):
        for k in np.flatnonzero(may_run[:, layer]):
            solver.Add(row <= float(seconds[k, layer] / scale) * prices[k])
    solver.Add(sum(float(n) * price for n, price in zip(counts, prices, strict=True)) == 1)
    solver.Maximize(sum(paid))
    solver.Solve()
    found = np.array([max(0.0, price.solution_value()) for price in prices])
    return found if found.max() > 0 else np.ones(len(counts))


class LayerMaster:
    """The prices of layers with the most that layers pay beyond what devices earn.

    A column is what a device may hold within a time. Columns are added as they are needed (Gilmore
    and Gomory 1961, "A linear programming approach to the cutting-stock problem").

    Args:
        counts: (H) devices of each kind.
        layers: their number.
        microbatches: that each layer pays for.
    """

    def __init__(self, counts: IntArray, layers: int, microbatches: int) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._price = [self._solver.NumVar(0, 1, "") for _ in range(layers)]
        infinity = self._solver.infinity()
        self._earned = [self._solver.NumVar(0, infinity, "") for _ in counts]
        earned = sum(float(n) * each for n, each in zip(counts, self._earned, strict=True))
        self._solver.Maximize(microbatches * sum(self._price) - earned)

    def add(self, kind: int, columns: Sequence[FloatArray]) -> None:
        """Let every device of a kind earn at least as much as with each of some columns.

        A column has the microbatches of each layer (N) that the device takes.
        """
        for column in columns:
            row = self._solver.Constraint(-self._solver.infinity(), 0.0)
            row.SetCoefficient(self._earned[kind], -1.0)
            for layer in np.flatnonzero(column):
                row.SetCoefficient(self._price[layer], float(column[layer]))

    def prices(self) -> FloatArray | None:
        """Return the best prices, rounded; None if devices earn all that layers pay."""
        status = self._solver.Solve()
        if status != pywraplp.Solver.OPTIMAL or self._solver.Objective().Value() <= LEAST_LEFT:
            return None
        return np.array([round(price.solution_value(), DIGITS) for price in self._price])

    def earned(self, kind: int) -> float:
        """Return what a device of a kind earns by the best prices."""
        return float(self._earned[kind].solution_value())
