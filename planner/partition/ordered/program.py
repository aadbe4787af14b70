"""The best partition along an order of devices for the bound on the iteration time.

Stages take the devices in order, replicas side by side. Whether a limit can be kept is decided by
a dynamic program: for every cut and number of devices, the least sum of the head of the next stage
and its way back to the end of the iteration. A stage keeps the limit if that sum and its load do;
the least limit is found by bisection. Transfers are estimated by one of the pairs of
devices, so the result is scored again by planner.partition.bounds.schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.partition.bisection import narrowed_s
from planner.partition.chain import FloatArray, Partition, StageChoice
from planner.partition.ordered.stages import StageCosts

Unit = tuple[int, ...]
"""Device numbers that always stay together: one device, or in large clusters several of a node."""
Order = tuple[Unit, ...]
Row = FloatArray
"""By cut: the least head and way back of a stage that begins there, and its head alone."""


@dataclass(frozen=True)
class _Start:
    """Where and on what a stage may begin.

    Attributes:
        order: all units.
        first, used: the stage lies on the units from the one to the other, exclusive.
        before: the row of the units before these.
        cuts: at which the stage may begin.
        limit_s: to keep.
    """

    order: Order
    first: int
    used: int
    before: Row
    cuts: slice
    limit_s: float

    @property
    def units(self) -> Order:
        """The stage's."""
        return self.order[self.first : self.used]


class OrderProgram:
    """The dynamic program.

    Args:
        costs: of stages on devices.
        replicas: numbers of units a stage may have.
    """

    def __init__(self, costs: StageCosts, replicas: Sequence[int]) -> None:
        self.costs = costs
        self.replicas = sorted(replicas)
        table = costs.intervals
        chain = table.chain
        self._microbatches = table.microbatches
        self._cells = table.count
        self._rest_s = table.behind(chain.least_work_s)
        self._prices = chain.load_prices
        cheapest = (self._prices[:, None] * chain.work_s).min(axis=0)
        self._work_left = table.behind(cheapest) * self._microbatches * (1 - 1e-9)

    def reach(self, order: Order, limit_s: float, kept: Sequence[Row] = ()) -> list[Row]:
        """Least head and way back at every cut, by the number of units used.

        Args:
            order: units of devices.
            limit_s: stages that break it are left out.
            kept: the first rows, known from an order that begins alike, under the same limit.
        """
        self.costs.keep_limit(limit_s)
        rows = list(kept)
        if not rows:
            start = np.full((2, self._cells + 1), np.inf)
            start[:, 0] = 0.0
            rows = [start]
        left = self._capacity_left(order, limit_s)
        for used in range(len(rows), len(order) + 1):
            row = np.full((2, self._cells + 1), np.inf)
            for replicas in self.replicas:
                if replicas > used:
                    break
                first = used - replicas
                cuts = self._alive(rows[first], left[first], limit_s)
                if cuts is not None:
                    self._extend(row, _Start(order, first, used, rows[first], cuts, limit_s))
            rows.append(row)
        return rows

    def _capacity_left(self, order: Order, limit_s: float) -> list[float]:
        """Priced work that the units from each place on can do within the limit."""
        each = [sum(self._prices[self.costs.kinds[d]] for d in unit) * limit_s for unit in order]
        return [float(x) for x in np.cumsum([0.0, *reversed(each)])[::-1]]

    def _alive(self, row: Row, capacity: float, limit_s: float) -> slice | None:
        """From the first to the last cut that may still lead to the end within the limit."""
        good = (row[0, :-1] + self._rest_s <= limit_s) & (self._work_left <= capacity)
        cuts = np.flatnonzero(good)
        return slice(int(cuts[0]), int(cuts[-1]) + 1) if len(cuts) else None

    def _extend(self, row: Row, start: _Start) -> None:
        """Let the last stage so far begin there."""
        ends, new = self._stage(start)
        if not new.size:
            return
        begin, end = new[0].argmin(axis=0), np.arange(new.shape[2])
        found = new[:, begin, end]
        window = row[:, ends]
        window[:] = np.where(found[0] < window[0], found, window)

    def _stage(self, start: _Start) -> tuple[slice, FloatArray]:
        """The cuts at which a stage may end, and what the row says after it."""
        devices, cuts = _devices(start.units), start.cuts
        figures = self.costs.figures(self.costs.counts(devices))
        ends = slice(cuts.start + 1, int(figures.last_end[cuts.stop - 1]) + 1)
        block = (cuts, ends)
        if ends.stop <= ends.start:
            return ends, np.empty((2, 0, 0))
        # 1F1B keeps as many microbatches in flight as there are devices from here on.
        in_flight = -(-(len(start.order) - start.first) // len(start.units))
        load = figures.load_within_memory_s(block, min(in_flight, self._microbatches))
        arrival, head = self._arrival(start)[:, :, None]
        home = head + figures.end_s(block, *self.costs.reduction(devices))
        spent = np.maximum(arrival, home)
        after = np.where(spent + load <= start.limit_s, spent + figures.path_s[block], np.inf)
        return ends, np.stack([after, head + figures.forward_s[block]])

    def _arrival(self, start: _Start) -> FloatArray:
        """Head and way back of a stage with its transfers, over its best link; its head alone."""
        cuts, units = start.cuts, start.units
        before = start.before[:, cuts]
        if start.first == 0:
            return before
        spent, head = before
        source = start.order[start.first - 1][-1]
        s_per_byte = self.costs.links.s_per_byte[source]
        target = min((unit[0] for unit in units), key=s_per_byte.item)
        there, back = (seconds[cuts] for seconds in self.costs.transfer_s(source, target))
        arrival = np.stack([spent + there + back, head + there])
        if len(units) > 1 or len(units[0]) > 1 or not self.costs.links.is_exclusive:
            return arrival
        longer, shorter = np.maximum(there, back), np.minimum(there, back)
        busy = spent + self._microbatches * longer + shorter + self._rest_s[cuts]
        arrival[0, busy > start.limit_s] = np.inf
        return arrival

    def time_s(self, rows: Sequence[Row]) -> float:
        """One microbatch's way, or infinity if the limit cannot be kept."""
        return float(min(row[0, -1] for row in rows[1:]))

    def keeps(self, order: Order, limit_s: float) -> bool:
        """Whether the order has a partition within the limit."""
        return self.time_s(self.reach(order, limit_s)) <= limit_s

    def least_limit_s(
        self,
        order: Order,
        low_s: float,
        high_s: float,
        tolerance: float = 1e-4,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """The least limit the order can keep, or one it can keep; None if not even ``high_s``."""
        if not self.keeps(order, high_s):
            return None
        return narrowed_s(partial(self.keeps, order), low_s, high_s, tolerance, may_go_on)[1]

    def partition(self, order: Order, limit_s: float) -> Partition | None:
        """A partition within the limit, if there is one."""
        rows = self.reach(order, limit_s)
        if self.time_s(rows) > limit_s:
            return None
        used = min(range(1, len(rows)), key=lambda n: rows[n][0, -1])
        end, stages = self._cells, []
        while end > 0:
            begin, replicas = self._last_stage(rows, order, used, end, limit_s)
            stages.append(self._choice(begin, end, _devices(order[used - replicas : used])))
            used, end = used - replicas, begin
        return tuple(reversed(stages))

    def _last_stage(
        self, rows: Sequence[Row], order: Order, used: int, end: int, limit_s: float
    ) -> tuple[int, int]:
        """The cut and number of replicas of the last stage of the best way to a state."""
        for replicas in self.replicas:
            if replicas > used:
                break
            first = used - replicas
            cuts = self._alive(rows[first], np.inf, limit_s)
            if cuts is None or cuts.start >= end:
                continue
            ends, new = self._stage(_Start(order, first, used, rows[first], cuts, limit_s))
            if new.size and ends.start <= end < ends.stop:
                begins = np.flatnonzero(new[0, :, end - ends.start] == rows[used][0, end])
                if len(begins):
                    return cuts.start + int(begins[0]), replicas
        raise AssertionError("the dynamic program reached a state by no stage")

    def _choice(self, begin: int, end: int, devices: Unit) -> StageChoice:
        table = self.costs.intervals
        names = table.chain.problem.cluster.device_names
        held = tuple(names[device] for device in devices)
        return StageChoice(int(table.cuts[begin]), int(table.cuts[end]), held)


def _devices(units: Order) -> Unit:
    return tuple(sorted(device for unit in units for device in unit))
