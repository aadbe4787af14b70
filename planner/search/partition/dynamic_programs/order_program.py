"""The best partition along an order of devices for the bound on the iteration time.

Stages take the devices in order, replicas next to each other. A state of the dynamic program is a
number of devices and a cut; the least limit that stages can keep is found by bisection. Transfers
are estimated by one of the pairs of devices, so the result is scored again by
planner.search.partition.bounds.schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.search.partition.chain import FloatArray, Partition, StageChoice
from planner.search.partition.dynamic_programs.core import (
    filled_table,
    least_limit_s,
    stages_within_limit,
)
from planner.search.partition.dynamic_programs.order_stages import OrderStageCosts

Unit = tuple[int, ...]
"""Device numbers that always stay together: one device, or in large clusters several of a node."""
Order = tuple[Unit, ...]
Row = FloatArray
"""By cut: the least head and tail of a stage that begins there, and its head alone."""


@dataclass(frozen=True)
class _Frontier:
    """The states from which a stage may begin on the units from some place on.

    Attributes:
        first: the place.
        before: the row of the units before it.
        cuts: at which the stage may begin.
    """

    first: int
    before: Row
    cuts: slice


class OrderProgram:
    """The dynamic program for any order and limit.

    Args:
        costs: of stages on devices.
        replicas: numbers of units a stage may have.
    """

    def __init__(self, costs: OrderStageCosts, replicas: Sequence[int]) -> None:
        self.costs = costs
        self.replicas = sorted(replicas)
        chain, intervals = costs.intervals.chain, costs.intervals
        self.prices = chain.load_prices
        cheapest = (self.prices[:, None] * chain.work_s).min(axis=0)
        self.rest_s = intervals.rest_s[:-1]
        self.work_left = intervals.after(cheapest) * intervals.microbatches * (1 - 1e-9)

    def reach(self, order: Order, limit_s: float, kept: FloatArray | None = None) -> FloatArray:
        """Return the least head and tail at every cut, by the number of units used.

        Args:
            order: units of devices.
            limit_s: stages that break it are left out.
            kept: the first rows, known from an order that begins alike, under the same limit.
        """
        return filled_table(_OrderStates(self, order, limit_s, kept))

    def least_limit_s(
        self,
        order: Order,
        low_s: float,
        high_s: float,
        tolerance: float = 1e-4,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float | None:
        """Return the least limit the order can keep, or one it can; None if not even ``high_s``."""
        states = partial(_OrderStates, self, order)
        found = least_limit_s([states], low_s, high_s, tolerance, may_go_on)
        return None if found is None else found[1]

    def partition(self, order: Order, limit_s: float) -> Partition | None:
        """Return a partition within the limit, if there is one."""
        stages = stages_within_limit(_OrderStates(self, order, limit_s))
        return None if stages is None else tuple(stages)


def least_s(table: FloatArray) -> float:
    """Return a microbatch's way in a table of :meth:`OrderProgram.reach`; infinite if too long."""
    return float(table[1:, 0, -1].min())


class _OrderStates:
    """The states by number of units used and cut.

    Args:
        program: the costs and the numbers of replicas.
        order: units of devices.
        limit_s: to keep.
        kept: the first rows of the table, if they are known.
    """

    def __init__(
        self, program: OrderProgram, order: Order, limit_s: float, kept: FloatArray | None = None
    ) -> None:
        self.limit_s = limit_s
        self._program = program
        self._costs = program.costs
        self._order = order
        self._kept = kept
        self._cells = program.costs.intervals.count
        self._microbatches = program.costs.intervals.microbatches
        each = [sum(program.prices[self._costs.kinds[d]] for d in unit) * limit_s for unit in order]
        self._capacity_left = np.cumsum([0.0, *reversed(each)])[::-1]

    def first_table(self) -> FloatArray:
        """Return a table by units used, (head and tail, head alone) and cut."""
        self._costs.keep_limit(self.limit_s)
        table = np.full((len(self._order) + 1, 2, self._cells + 1), np.inf)
        if self._kept is None:
            table[0, :, 0] = 0.0
        else:
            table[: len(self._kept)] = self._kept
        return table

    def passes(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the units before each last stage, and its number of units."""
        for used in range(1 if self._kept is None else len(self._kept), len(self._order) + 1):
            yield from self._last_stages(used)

    def _last_stages(self, used: int) -> Iterator[tuple[int, list[int]]]:
        for replicas in self._program.replicas:
            if replicas > used:
                return
            yield used - replicas, [replicas]

    def frontier(self, table: FloatArray, step: int) -> _Frontier | None:
        """Return the cuts, first to last, that leave room for the work after them."""
        program, row = self._program, table[step]
        good = row[0, :-1] + program.rest_s <= self.limit_s
        cuts = np.flatnonzero(good & (program.work_left <= self._capacity_left[step]))
        if not len(cuts):
            return None
        return _Frontier(step, row, slice(int(cuts[0]), int(cuts[-1]) + 1))

    def least_s(self, table: FloatArray) -> float:
        """Return the least value of all layers in stages."""
        return least_s(table)

    def extend(self, table: FloatArray, frontier: _Frontier, option: int) -> None:
        """Add a stage on so many units."""
        ends, new = self._after(frontier, option)
        if not new.size:
            return
        begin, end = new[0].argmin(axis=0), np.arange(new.shape[2])
        found = new[:, begin, end]
        window = table[frontier.first + option][:, ends]
        window[:] = np.where(found[0] < window[0], found, window)

    def _after(self, frontier: _Frontier, replicas: int) -> tuple[slice, FloatArray]:
        """Return the cuts at which a stage may end, and the values after it, by begin and end."""
        units, cuts = self._order[frontier.first : frontier.first + replicas], frontier.cuts
        devices = _devices(units)
        figures = self._costs.figures(self._costs.counts(devices))
        ends = slice(cuts.start + 1, int(figures.last_end[cuts.stop - 1]) + 1)
        block = (cuts, ends)
        if ends.stop <= ends.start:
            return ends, np.empty((2, 0, 0))
        # 1F1B keeps as many microbatches in flight as there are devices from here on.
        in_flight = -(-(len(self._order) - frontier.first) // replicas)
        load = figures.load_within_memory_s(block, min(in_flight, self._microbatches))
        arrival, head = self._arrival(frontier, units)[:, :, None]
        tail = head + figures.end_s(block, *self._costs.reduction(devices))
        spent = np.maximum(arrival, tail)
        after = np.where(spent + load <= self.limit_s, spent + figures.path_s[block], np.inf)
        return ends, np.stack([after, head + figures.forward_s[block]])

    def _arrival(self, frontier: _Frontier, units: Order) -> FloatArray:
        """Return head and tail of a stage with its best link, and its head alone."""
        cuts, links = frontier.cuts, self._costs.links
        before = frontier.before[:, cuts]
        if frontier.first == 0:
            return before
        spent, head = before
        source = self._order[frontier.first - 1][-1]
        target = min((d for unit in units for d in unit), key=links.s_per_byte[source].item)
        there, back = (seconds[cuts] for seconds in self._costs.transfer_s(source, target))
        arrival = np.stack([spent + there + back, head + there])
        if len(units) > 1 or len(units[0]) > 1 or not links.is_exclusive:
            return arrival
        longer, shorter = np.maximum(there, back), np.minimum(there, back)
        busy = spent + self._microbatches * longer + shorter + self._program.rest_s[cuts]
        arrival[0, busy > self.limit_s] = np.inf
        return arrival

    # --- reconstruction ----------------------------------------------------------------------

    def best(self, table: FloatArray) -> tuple[int, int]:
        """Return the number of units of the least value, and the last cut."""
        return 1 + int(table[1:, 0, -1].argmin()), self._cells

    def is_start(self, state: tuple[int, int]) -> bool:
        """Return whether no layer is in a stage."""
        return state[1] == 0

    def passes_to(self, state: tuple[int, int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the units before the last stage, and its number of units, fewest first."""
        return self._last_stages(state[0])

    def last_stage(
        self, table: FloatArray, frontier: _Frontier, option: int, state: tuple[int, int]
    ) -> tuple[StageChoice, tuple[int, int]] | None:
        """Return the stage on so many units, if it led to the state, from the first cut it can."""
        used, end = state
        if frontier.cuts.start >= end:
            return None
        ends, new = self._after(frontier, option)
        if not new.size or not ends.start <= end < ends.stop:
            return None
        begins = np.flatnonzero(new[0, :, end - ends.start] == table[used, 0, end])
        if not len(begins):
            return None
        begin = frontier.cuts.start + int(begins[0])
        devices = _devices(self._order[frontier.first : used])
        return self._choice(begin, end, devices), (frontier.first, begin)

    def _choice(self, begin: int, end: int, devices: Unit) -> StageChoice:
        intervals = self._costs.intervals
        names = intervals.chain.problem.cluster.device_names
        held = tuple(names[device] for device in devices)
        return StageChoice(int(intervals.cuts[begin]), int(intervals.cuts[end]), held)


def _devices(units: Order) -> Unit:
    return tuple(sorted(device for unit in units for device in unit))
