"""Arguments of certificates: whether each proves that no plan keeps a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from planner.bounds.budget import Budget
from planner.bounds.classes import MARGIN, ClassProgram
from planner.bounds.columns import DeviceTable, Pairs
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FloatArray
from planner.bounds.prices import DIGITS, LayerMaster
from planner.plan.certificate import Argument, LayerPrices, LikeDevices, TypePrices
from planner.units import significant

MOST_ROUNDS = 60
"""Rounds of new columns for one time."""
SAME = 1e-9
"""A column is new if it earns that much more."""
MOST_STAGES, MOST_PAIR_CELLS = 2, 4e6
"""Stages of a device, and states that are gone through to price the columns of all kinds once."""
SPREAD = 1.1
"""By this factor the price of a type is raised or lowered to see whether that proves more."""


class TimeArgument(Protocol):
    """A reason why times are not kept, of which the largest is searched for."""

    @property
    def looked_at(self) -> float:
        """States that have been looked at so far."""

    def refute(self, time_s: float) -> Argument | None:
        """Return what proves that no plan keeps a time; None if nothing does."""


class OfClasses:
    """No sequence of stages keeps the time on classes of devices.

    Args:
        intervals: of the problem's layers.
        classes: all devices, in classes of one type each.

    Raises:
        PipeplanError: if there are too many combinations of devices.
    """

    def __init__(self, intervals: IntervalTable, classes: tuple[tuple[str, ...], ...]) -> None:
        self._argument = LikeDevices(classes=classes)
        self._program = ClassProgram(intervals, classes)

    @property
    def looked_at(self) -> float:
        """Stages that passes have looked at."""
        return self._program.looked_at

    def refute(self, time_s: float) -> Argument | None:
        """Return the classes if no plan keeps a time."""
        return self._argument if self._program.refutes(time_s) else None


class OfPrices:
    """No sequence of stages keeps the time on devices that a budget pays for.

    Prices of types are moved to where they refute what those before did not.

    Args:
        intervals: of the problem's layers.

    Raises:
        PipeplanError: if there are too many layers and types.
    """

    def __init__(self, intervals: IntervalTable) -> None:
        layers = intervals.layers
        self._types, self._budget = layers.types, Budget(intervals)
        work = np.where(layers.may_run, layers.forward_s + layers.backward_s, 0.0)
        self._prices = 1 / np.maximum(work.sum(axis=1), 1e-30)
        self._turn = 0

    @property
    def looked_at(self) -> float:
        """Stages that passes have looked at."""
        return self._budget.looked_at

    def refute(self, time_s: float) -> Argument | None:
        """Return prices by which no plan keeps a time: those before, or others near them."""
        for prices in self._near():
            argument = TypePrices(prices=self._named(prices))
            if self._budget.refutes(argument.prices, time_s):
                self._prices = prices
                return argument
        return None

    def _near(self) -> Iterator[FloatArray]:
        """Yield the prices so far, then these with that of one type raised or lowered, in turn."""
        yield self._prices
        if len(self._types) > 1:
            moved = self._prices.copy()
            moved[self._turn // 2 % len(moved)] *= SPREAD if self._turn % 2 else 1 / SPREAD
            self._turn += 1
            yield moved

    def _named(self, prices: FloatArray) -> dict[str, float]:
        share = prices / prices.max()
        return {
            name: significant(float(price), DIGITS)
            for name, price in zip(self._types, share, strict=True)
        }


class OfColumns:
    """Devices with up to two stages earn less than all layers pay.

    Args:
        table: of the devices.
    """

    def __init__(self, table: DeviceTable) -> None:
        self._table, self._count = table, table.intervals.layers.count
        self.looked_at = 0.0

    def refute(self, time_s: float) -> Argument | None:
        """Return prices of layers by which no plan keeps a time, if there are any."""
        arrays, kinds = self._table.arrays, range(len(self._table.arrays.counts))
        limit_s = time_s * MARGIN
        columns = Pairs(self._table, limit_s)
        master = LayerMaster(arrays.counts, self._count, arrays.microbatches)
        for _ in range(MOST_ROUNDS):
            prices = master.prices()
            if prices is None:
                return None
            self.looked_at += _pair_cells(self._table)
            found = [columns.best(kind, prices) for kind in kinds]
            most = [max((c.value for c in row), default=0.0) for row in found]
            earned = sum(int(n) * value for n, value in zip(arrays.counts, most, strict=True))
            if arrays.microbatches * float(prices.sum()) > earned * MARGIN:
                return LayerPrices(prices=tuple(map(float, prices)))
            known = [master.earned(kind) + SAME for kind in kinds]
            new = [[c for c in row if c.value > known[kind]] for kind, row in enumerate(found)]
            if not any(new):
                return None
            for kind, row in enumerate(new):
                master.add(kind, row)
        return None


def _pair_cells(table: DeviceTable) -> float:
    d, layers = table.arrays, table.intervals.layers.count
    numbers = d.microbatches if d.replication else 1
    return layers**4 / 24 * numbers * len(d.counts)


def column_arguments(intervals: IntervalTable) -> Iterator[OfColumns]:
    """Yield the argument on pairs of stages, where there are not too many to look at."""
    table = DeviceTable(intervals)
    if table.arrays.stages == MOST_STAGES and _pair_cells(table) <= MOST_PAIR_CELLS:
        yield OfColumns(table)
