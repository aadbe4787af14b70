"""What a second on each device type is worth, when all devices are to be busy alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def even_load_prices(seconds: FloatArray, counts: FloatArray) -> FloatArray:
    """Price of a second on each device type, all devices together costing 1.

    By weak duality any such prices give a valid bound: each layer is paid at least its cheapest
    price. The dual values of the even-load linear program give the best one; they are made
    feasible here, so that the solver's tolerances cannot spoil the bound.

    Args:
        seconds: of each layer, by type: types x layers.
        counts: devices of each type.
    """
    if len(counts) == 1:
        return 1 / counts
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = float(seconds.max()) or 1.0
    load = solver.NumVar(0, solver.infinity(), "load")
    shares = [[solver.NumVar(0, 1, "") for _ in row] for row in seconds]
    for layer in zip(*shares, strict=True):
        solver.Add(sum(layer) == 1)
    rows = []
    for row, times, count in zip(shares, seconds, counts, strict=True):
        work = sum(share * (t / scale) for share, t in zip(row, times, strict=True))
        rows.append(solver.Add(work <= load * count))
    solver.Minimize(load)
    solver.Solve()
    prices = np.array([max(0.0, -row.dual_value()) for row in rows])
    total = float((prices * counts).sum())
    return prices / total if total > 0 else 1 / (counts * len(counts))
