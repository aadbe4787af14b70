"""A bound on every plan: all devices of a type are alike and may use the best links of all.

On such a cluster only the number of devices of each type in a stage matters. Whether a time T can
be reached is then decided exactly: for every cut and every number of devices used, dynamic
programming over stages that keep T finds the least sum of the next stage's head and of its way
back to the end of the iteration. The least T that can be reached is no more than the best plan's
iteration time. Stages may
be any interval of the chain, with one stage a device, whatever the schedule.

Where devices come in groups (nodes on a network), the program also counts how many groups the
devices used lie in at least, and has some cut or some stage cross the network for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.cluster.link_table import LinkTable
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain, FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import (
    ROUNDING,
    keeps_limit,
    programs,
    ruled_out_s,
)
from planner.search.partition.intervals import MAX_CUTS
from planner.search.partition.relaxations.type_figures import TypeFigures, TypeOption

MAX_STATES = 60_000
MAX_WORK = 4e9
"""Numbers of devices by type, and steps of the program, beyond which it takes too long."""


@dataclass(frozen=True)
class _Frontier:
    """The states reached at a cut that may still keep the limit.

    Attributes:
        cut: where the next stage begins.
        alive: states, with their spare crossings.
        spent_s: least head and tail of the next stage, by state.
    """

    cut: int
    alive: IntArray
    spent_s: FloatArray


def is_tractable(chain: Chain) -> bool:
    """Return whether the program is small enough to be run."""
    states = prod(count + 1 for count in chain.counts)
    options = states if chain.problem.job.replication else len(chain.counts)
    cuts = min(chain.length, MAX_CUTS)
    return states <= MAX_STATES and states * options * cuts * 8 <= MAX_WORK


class TypeRelaxation:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self._figures = [TypeFigures(chain, links, program) for program in programs(chain)]
        self._chain = chain

    def bound_s(
        self,
        known_s: float,
        tolerance: float = 1e-4,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """Return a time that no plan beats, not more than that of a known plan.

        Args:
            known_s: iteration time of any plan, or any valid time limit.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step of it.
        """

        def keeps(limit_s: float) -> bool:
            rounded_s = limit_s * ROUNDING
            return all(keeps_limit(_TypeStates(figures, rounded_s)) for figures in self._figures)

        return ruled_out_s(keeps, work_bound_s(self._chain), known_s, tolerance, may_go_on)


class _TypeStates:
    """The states by devices used of each type and spare crossings of the network."""

    def __init__(self, figures: TypeFigures, limit_s: float) -> None:
        self.limit_s = limit_s
        self._figures = figures
        self._count = len(figures.used)
        self._capacity_left = figures.price_left * limit_s

    def first_table(self) -> FloatArray:
        """Return a table by cut and state in which the start is reached."""
        figures = self._figures
        table = np.full(
            (figures.intervals.count + 1, (figures.spare_end + 1) * self._count), np.inf
        )
        table[0, 0] = 0.0
        return table

    def passes(self) -> Iterator[tuple[int, list[TypeOption]]]:
        """Yield every cut with all options."""
        for cut in range(self._figures.intervals.count):
            yield cut, self._figures.options

    def frontier(self, table: FloatArray, step: int) -> _Frontier | None:
        """Return the undominated states that leave room for the work after a cut."""
        figures, row = self._figures, table[step]
        alive = np.flatnonzero(
            self._undominated(row) <= self.limit_s - figures.intervals.beyond_s[step]
        )
        alive = alive[self._capacity_left[alive % self._count] >= figures.work_left[step]]
        return _Frontier(step, alive, row[alive]) if len(alive) else None

    def least_s(self, table: FloatArray) -> float:
        """Return the least value of all layers in stages."""
        return float(table[-1].min())

    def _undominated(self, row: FloatArray) -> FloatArray:
        """Return the row, infinite where fewer devices, or more spare crossings, do as well."""
        times = row.reshape(self._figures.spare_end + 1, *self._figures.shape)
        least = np.flip(np.minimum.accumulate(np.flip(times, 0)), 0)
        for axis in range(1, times.ndim):
            least = np.minimum.accumulate(least, axis=axis)
        kept = times.copy()
        for axis in range(times.ndim):
            better = np.full_like(times, np.inf)
            source, target = [slice(None)] * times.ndim, [slice(None)] * times.ndim
            source[axis], target[axis] = slice(None, -1), slice(1, None)
            if axis == 0:
                source, target = target, source
            better[tuple(target)] = least[tuple(source)]
            kept[better <= times] = np.inf
        return kept.ravel()

    def extend(self, table: FloatArray, frontier: _Frontier, option: TypeOption) -> None:
        """Add a stage from the frontier's cut on to every state that has the devices for it."""
        figures, cut = self._figures, frontier.cut
        head_s, used = figures.intervals.head_s[cut], frontier.alive % self._count
        own = head_s + option.own_s[cut, cut + 1 :]
        # The longer of two stages may have less to wait for, and nothing tied to reduce.
        ends = int(np.flatnonzero(own <= self.limit_s).max(initial=-1)) + 1
        room = np.array(figures.counts) - np.array(option.counts)
        enough = (figures.used[used] <= room).all(axis=1)
        if not ends or not enough.any():
            return
        columns = slice(cut + 1, cut + 1 + ends)
        load, path = option.load_s[cut, columns], option.path_s[cut, columns]
        tail = head_s + option.end_s[cut, columns]
        target = used[enough] + figures.offset(option.counts)
        more = figures.needed_groups[target] - figures.needed_groups[used[enough]]
        window = table[columns].T
        for slow, arrival in self._arrivals(frontier.spent_s[enough], cut, option):
            spare = self._spare_after(frontier.alive[enough] // self._count, slow - more)
            if option.crosses:
                # Its all-reduce crosses the network for every group it lies in: any number.
                spare = np.full_like(spare, figures.spare_end)
            good = (spare >= 0) & np.isfinite(arrival)
            spent_s = np.maximum(arrival[good, None], tail)
            new = np.where(spent_s + load <= self.limit_s, spent_s + path, np.inf)
            # States that differ in spare crossings alone may become one: several at one place.
            np.minimum.at(window, (spare * self._count + target)[good], new)

    def _arrivals(
        self, spent: FloatArray, cut: int, option: TypeOption
    ) -> Iterator[tuple[int, FloatArray]]:
        """Yield the time spent on arrival over a link in the group and across the network."""
        figures = self._figures
        if cut == 0:
            yield 0, spent
            return
        held = [k for k, count in enumerate(option.counts) if count]
        for slow in range(len(figures.send[0])):
            there = min(figures.send[k][slow][0][cut] for k in held)
            back = min(figures.send[k][slow][1][cut] for k in held)
            arrival = spent + there + (back if figures.program == "through" else 0.0)
            if figures.single and figures.links.is_exclusive:
                # All microbatches one after the other over a single link, then on and back.
                busy = figures.intervals.microbatches * max(there, back) + min(there, back)
                keeps = spent + busy + figures.intervals.rest_s[cut] <= self.limit_s
                arrival = np.where(keeps, arrival, np.inf)
            yield slow, arrival

    def _spare_after(self, spare: IntArray, change: IntArray) -> IntArray:
        """Return the crossings left, negative where one is missing; any number stays that."""
        most = self._figures.spare_end
        return np.asarray(np.where(spare >= most, most, np.minimum(spare + change, most)))
