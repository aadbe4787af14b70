"""One pass of the class relaxation: which sequences of stages keep a limit on the iteration time.

A state is a cut, the devices used so far and those of the stage that ends there, both as vectors of
numbers by class. It has two values, each the least over all ways to reach it:

- when the first, second, ... microbatch leaves the stage at the earliest (its *departures*);
- what passes before the next stage's first forward and after its last gradient, without the
  messages between the two (*spent*).

Microbatches leave a stage with r replicas one after the other: the k-th no sooner than a forward
after the k-th has arrived, and than a forward after number k - r has left. So replicas begin one
after the other as well, each with less time left than the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import comb, prod

import numpy as np

from planner.search.partition.chain import FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import ROUNDING
from planner.search.partition.intervals import BoolArray
from planner.search.partition.relaxations.class_figures import ClassFigures, ClassStageFigures, Hops

DEPARTURES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatches whose departures are kept; those between two count as the lower one."""

SLACK = 1e-12
"""Share of the limit that a replica may run longer: with work that takes no time it runs all."""

Stage = tuple[int, int, int]
"""Cuts at which a stage begins and ends, and the number of its vector."""


def most_steps(sizes: IntArray, *, replication: bool) -> int:
    """Return how many steps from one pair of vectors to the next there are at a cut, at most."""
    if replication:
        return prod(comb(int(size) + 3, 3) for size in sizes)
    return prod(int(size) + 1 for size in sizes) * len(sizes) ** 2


class Steps:
    """All steps from the devices used so far, with a last stage, to those with one more stage.

    Args:
        vectors: of devices by class, a row each; the first is empty.
        sizes: of the classes.
        holds: whether each vector may hold a stage.

    Attributes:
        used, last: vectors of each state of a cut; the first state is the start.
        source, target: states before and after each step, in the order of ``target``.
    """

    def __init__(self, vectors: IntArray, sizes: IntArray, holds: BoolArray) -> None:
        within = (vectors[None, :, :] <= vectors[:, None, :]).all(axis=2) & holds[None, :]
        within[0, 0] = True
        self.used, self.last = np.nonzero(within)
        state_of = np.full(within.shape, -1)
        state_of[self.used, self.last] = np.arange(len(self.used))
        place = np.zeros(len(vectors), dtype=int)
        strides = np.append(np.cumprod((sizes + 1)[:0:-1])[::-1], 1)
        sources, targets = [place[:0]], [place[:0]]
        for number in np.flatnonzero(holds):
            used = vectors[self.used] + vectors[number]
            source = np.flatnonzero((used <= sizes).all(axis=1))
            sources.append(source)
            targets.append(state_of[used[source] @ strides, number])
        source, target = np.concatenate(sources), np.concatenate(targets)
        order = np.argsort(target, kind="stable")
        self.source, self.target = source[order], target[order]

    def of(self, state: int) -> IntArray:
        """Return the steps that lead to a state."""
        first, end = np.searchsorted(self.target, [state, state + 1])
        return np.arange(first, end)


@dataclass(frozen=True)
class _Arrived:
    """States of a stage that begins at a cut.

    Attributes:
        states: of its end.
        arrivals_s: of the microbatches whose departures are kept, by number and state.
        spent_s: before its first forward and after its last gradient.
        left_s, all_left_s: first departure and ``spent`` of the stage before, without messages.
    """

    states: IntArray
    arrivals_s: FloatArray
    spent_s: FloatArray
    left_s: FloatArray
    all_left_s: FloatArray


class ClassPass:
    """The states that are reached within a limit.

    Args:
        figures: of stages and what passes between them.
        stages: of these figures, or raised ones.
        steps: of the classes.
        limit_s: on the iteration time.
    """

    def __init__(
        self, figures: ClassFigures, stages: ClassStageFigures, steps: Steps, limit_s: float
    ) -> None:
        self._figures, self._stages, self._steps = figures, stages, steps
        self._table = figures.intervals
        self._limit_s = limit_s * ROUNDING
        replicas = int(figures.classes.sizes.sum())
        most = min(replicas, self._table.microbatches)
        self._numbers = [number for number in DEPARTURES if number <= most]
        cuts, states = self._table.count + 1, len(steps.used)
        self._spent_s = np.full((cuts, states), np.inf)
        self._departures_s = np.full((cuts, len(self._numbers), states), np.inf)
        self._begin = np.zeros((cuts, states), dtype=int)
        self._spent_s[0, 0] = self._departures_s[0, :, 0] = 0.0
        for cut in range(self._table.count):
            self._extend(cut)

    @property
    def keeps(self) -> bool:
        """Whether all layers are in stages."""
        return float(self._spent_s[-1].min()) <= self._limit_s

    def stages(self) -> list[Stage]:
        """Return stages that keep the limit, of least ``spent``."""
        found: list[Stage] = []
        cut, state = self._table.count, int(self._spent_s[-1].argmin())
        while cut > 0:
            begin = int(self._begin[cut, state])
            found.append((begin, cut, int(self._steps.last[state])))
            step = self._steps.of(state)
            hops, spent_s = self._hops(begin, step), self._spent_s[begin, self._steps.source[step]]
            step = step[(self._after_hop(spent_s, hops)).argmin()]
            cut, state = begin, int(self._steps.source[step])
        return found[::-1]

    # --- a cut -------------------------------------------------------------------------------

    def _extend(self, cut: int) -> None:
        """Add a stage to the states of a cut that leave room for the work behind it."""
        figures = self._figures
        is_alive = self._spent_s[cut] <= self._limit_s - self._table.beyond_s[cut]
        price_left = figures.price_left[self._steps.used]
        is_alive &= price_left * self._limit_s >= figures.work_left[cut]
        step = np.flatnonzero(is_alive[self._steps.source])
        if not len(step):
            return
        arrived = self._arrived(cut, step)
        if arrived is not None:
            self._add_stages(cut, arrived)

    def _arrived(self, cut: int, step: IntArray) -> _Arrived | None:
        hops, source = self._hops(cut, step), self._steps.source[step]
        all_left_s = self._spent_s[cut, source]
        spent_s = self._after_hop(all_left_s, hops)
        good = np.flatnonzero(np.isfinite(spent_s))
        if not len(good):
            return None
        arrivals_s = self._departures_s[cut][:, source] + hops.there_s
        for number, (before, here) in enumerate(pairwise(self._numbers)):
            one_by_one_s = arrivals_s[number] + (here - before) * hops.next_s
            arrivals_s[number + 1] = np.maximum(arrivals_s[number + 1], one_by_one_s)
        left_s = self._departures_s[cut][0, source]
        states, first = np.unique(self._steps.target[step[good]], return_index=True)

        def least(values: FloatArray) -> FloatArray:
            return np.asarray(np.minimum.reduceat(values[..., good], first, axis=-1))

        figures = (arrivals_s, spent_s, left_s, all_left_s)
        return _Arrived(states, *map(least, figures))

    def _after_hop(self, left_s: FloatArray, hops: Hops) -> FloatArray:
        """Return what is spent on arrival; infinite where the messages take too long."""
        in_time = left_s + hops.channel_s <= self._limit_s
        return np.where(in_time, left_s + hops.there_s + hops.back_s, np.inf)

    def _hops(self, cut: int, step: IntArray) -> Hops:
        if cut == 0:
            none = np.zeros(len(step))
            return Hops(none, none, none, none)
        ends = (self._steps.source[step], self._steps.target[step])
        return self._figures.hops[cut][self._steps.last[ends[0]], self._steps.last[ends[1]]]

    # --- stages ------------------------------------------------------------------------------

    def _add_stages(self, cut: int, arrived: _Arrived) -> None:
        vectors, stages = self._steps.last[arrived.states], self._stages
        columns = self._columns(cut, vectors, arrived)
        if columns is None:
            return
        block = (vectors, cut, columns)
        first_s, limit_s = arrived.arrivals_s[0][:, None], self._limit_s
        spent_s = np.maximum(arrived.spent_s[:, None], first_s + stages.after_s[block])
        keeps = spent_s + stages.way_s[block] <= limit_s
        keeps &= first_s + stages.own_s[block] <= limit_s
        keeps &= arrived.left_s[:, None] + stages.busy_s[block] <= limit_s
        keeps &= arrived.all_left_s[:, None] + stages.way_busy_s[block] <= limit_s
        row, column = np.nonzero(keeps)
        enough = self._run_all(cut, cut + 1 + column, vectors[row], arrived.arrivals_s[:, row])
        row, column = row[enough], column[enough]
        self._note(cut, arrived, row, cut + 1 + column, spent_s[row, column])

    def _columns(self, cut: int, vectors: IntArray, arrived: _Arrived) -> slice | None:
        """Return the ends that any state may keep."""
        first_s = arrived.arrivals_s[0][:, None]
        may = first_s + self._stages.own_s[vectors, cut, cut + 1 :] <= self._limit_s
        last = np.flatnonzero(may.any(axis=0)).max(initial=-1)
        return slice(cut + 1, cut + 2 + int(last)) if last >= 0 else None

    def _run_all(
        self, cut: int, end: IntArray, vector: IntArray, arrivals_s: FloatArray
    ) -> BoolArray:
        """Return whether replicas that begin one after the other can run all microbatches.

        Those of a type begin no sooner than as many microbatches have arrived.
        """
        replicas, count = self._figures.replicas[vector], self._table.microbatches
        slack_s = self._limit_s * SLACK
        left_s = self._limit_s + slack_s - self._stages.end_s[vector, cut, end]
        taken = np.zeros(len(end))
        ranges = list(pairwise([*self._numbers, int(self._figures.classes.sizes.sum()) + 1]))
        for kind, work_s in enumerate(self._table.work_s()):
            each_s = np.maximum(work_s[cut, end], slack_s / count)
            for number, (first, after) in enumerate(ranges):
                begin = np.clip(replicas[:, kind] - first + 1, 0, after - first)
                some = np.flatnonzero(begin)
                if len(some):
                    spare_s = np.maximum(left_s[some] - arrivals_s[number, some], 0.0)
                    most = np.minimum(np.floor(spare_s / each_s[some]), count)
                    taken[some] += begin[some] * most
        return np.asarray(taken >= count)

    def _note(
        self, cut: int, arrived: _Arrived, row: IntArray, end: IntArray, spent_s: FloatArray
    ) -> None:
        """Note states that are reached by stages, each once."""
        vector, state = self._steps.last[arrived.states[row]], arrived.states[row]
        spent_s = spent_s + self._stages.path_s[vector, cut, end]
        better = spent_s < self._spent_s[end, state]
        self._begin[end[better], state[better]] = cut
        self._spent_s[end, state] = np.minimum(self._spent_s[end, state], spent_s)
        forward_s = self._stages.forward_s[vector, cut, end]
        replicas = self._figures.replicas[vector].sum(axis=1)
        arrivals_s = arrived.arrivals_s[:, row]
        for number, leaves_s in enumerate(self._departing_s(arrivals_s, forward_s, replicas)):
            known = self._departures_s[:, number]
            known[end, state] = np.minimum(known[end, state], leaves_s)

    def _departing_s(
        self, arrivals_s: FloatArray, forward_s: FloatArray, replicas: IntArray
    ) -> list[FloatArray]:
        """Return when microbatches have left a stage, by number, from when they arrive at it."""
        leave_s: list[FloatArray] = []
        for here, arrival_s in zip(self._numbers, arrivals_s, strict=True):
            leaves_s = arrival_s + forward_s
            for before, left_s in zip(self._numbers, leave_s, strict=False):
                rounds = (here - before) // replicas
                leaves_s = np.maximum(leaves_s, left_s + rounds * forward_s)
            leave_s.append(leaves_s)
        return leave_s
