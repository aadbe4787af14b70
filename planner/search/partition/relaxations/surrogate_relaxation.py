"""A bound on every plan for large clusters: devices have prices and there is one budget.

As the type relaxation, but instead of a number of devices for each type there is one budget: a
device of each type has a price, a whole number, and all of the cluster together cost the budget
(a surrogate constraint, Glover 1968). Any prices give a bound. Those of the work bound are a good
start; wherever they allow a limit, the price of each type is multiplied, up if more devices are
used than there are, down if fewer. The program then has one state for each amount spent,
however many devices there are, and each stage takes the cheapest replicas that keep the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.cluster.link_table import LinkTable
from planner.search.partition.bounds.partition import work_bound_s
from planner.search.partition.chain import Chain, FloatArray, IntArray
from planner.search.partition.dynamic_programs.core import (
    ROUNDING,
    least_limit_s,
    programs,
    stages_within_limit,
)
from planner.search.partition.relaxations.type_figures import SurrogateFigures

BUDGET = 10_000
"""About how many units of price the whole cluster costs."""
STEP = 5
"""Units that are told apart where types have different prices; amounts are rounded down."""
ROUNDS = 16
"""Rounds of changing the prices towards using up every type."""
FIRST_STEP = 0.5
"""At first a price is multiplied, or divided, by at most e to this power."""
STEP_DECAY = 0.85
"""The power of each change over that of the one before."""


class RelaxedStage(NamedTuple):
    """A stage between two cuts, by their indices.

    Attributes:
        quickest: type of its quickest replica.
        type, replicas: of all its replicas, if they are of the type that is worth its price most.
    """

    begin: int
    end: int
    quickest: int
    type: int
    replicas: float


@dataclass(frozen=True)
class _Frontier:
    """The states reached at a cut that may still keep the limit.

    Attributes:
        cut: where the next stage begins.
        alive: amounts spent.
        spent_s: least head and tail of the next stage, by amount spent.
    """

    cut: int
    alive: IntArray
    spent_s: FloatArray


class SurrogateRelaxation:
    """The relaxation of one problem.

    Args:
        chain: the layers.
        links: of the cluster.

    Attributes:
        prices: of a device by type, all devices together costing 1; they change with the bound.
    """

    def __init__(self, chain: Chain, links: LinkTable) -> None:
        self.chain = chain
        self.links = links
        self.prices = chain.load_prices
        self._may_go_on: Callable[[], bool] = lambda: True
        self._figures = [SurrogateFigures(chain, links, program) for program in programs(chain)]
        self.intervals = self._figures[0].intervals
        self.kinds = self._figures[0].kinds
        self.counts = self._figures[0].counts

    def bound_s(
        self,
        known_s: float,
        tolerance: float = 1e-3,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> float:
        """Return a time that no plan beats, not more than that of a known plan.

        Args:
            known_s: iteration time of any plan, or any valid time limit.
            tolerance: of the bisection, relative.
            may_go_on: whether there is time for another step.
        """
        self._may_go_on = may_go_on
        bound = self._bisect(work_bound_s(self.chain), known_s, tolerance)
        step = FIRST_STEP
        for _ in range(ROUNDS if len(self.counts) > 1 else 0):
            target_s = bound * (1 + 2 * tolerance)
            if target_s >= known_s or not may_go_on():
                break
            stages = self.stages(target_s)
            if stages is None:
                bound = self._bisect(target_s, known_s, tolerance)
            else:
                self._change_prices(stages, step)
                step *= STEP_DECAY
        return bound

    def _change_prices(self, stages: Sequence[RelaxedStage], step: float) -> None:
        """Multiply them: dearer what more is used of than there is, cheaper what is left over."""
        used = np.zeros(len(self.counts))
        for stage in stages:
            used[stage.type] += stage.replicas
        self.prices = self.prices * np.exp(step * (used / self.counts - 1).clip(-1, 1))
        self.prices /= float(self.prices @ self.counts)

    def stages(self, limit_s: float) -> tuple[RelaxedStage, ...] | None:
        """Return stages that keep a limit on the relaxed cluster, or None if there are none."""
        found = stages_within_limit(_states(self._figures[0], self._whole_prices, limit_s))
        return None if found is None else tuple(found)

    def _bisect(self, low_s: float, high_s: float, tolerance: float) -> float:
        """Return the largest limit found that these prices rule out."""
        if low_s >= high_s:
            return high_s
        spaces = [partial(_states, figures, self._whole_prices) for figures in self._figures]
        found = least_limit_s(spaces, low_s, high_s, tolerance, self._may_go_on)
        return high_s if found is None else found[0]

    @property
    def _whole_prices(self) -> IntArray:
        whole = self.prices / float(self.prices @ self.counts) * BUDGET
        return np.asarray(np.maximum(1, np.round(whole)).astype(int))


def _states(figures: SurrogateFigures, price: IntArray, limit_s: float) -> _SurrogateStates:
    return _SurrogateStates(figures, price, limit_s * ROUNDING)


class _SurrogateStates:
    """The states by the amount spent on devices.

    Args:
        figures: of stages and cuts.
        price: of a device by type, a whole number.
        limit_s: to keep.
    """

    def __init__(self, figures: SurrogateFigures, price: IntArray, limit_s: float) -> None:
        self.limit_s = limit_s
        self._figures = figures
        self._intervals = figures.intervals
        self._price = price
        self._options = range(len(figures.counts))
        # Of one type, amounts are multiples of its price anyway.
        self._step = STEP if len(set(price.tolist())) > 1 else 1
        budget = int(price @ figures.counts)
        self._most = budget // self._step
        cheapest = (price[:, None] * figures.chain.work_s).min(axis=0)
        microbatches = self._intervals.microbatches
        self._work_left = self._intervals.after(cheapest) * microbatches / ROUNDING
        self._left = (budget - self._step * np.arange(self._most + 1)) * limit_s

    def first_table(self) -> FloatArray:
        """Return a table by cut and amount spent in which the start is reached."""
        table = np.full((self._intervals.count + 1, self._most + 1), np.inf)
        table[0, 0] = 0.0
        return table

    def passes(self) -> Iterator[tuple[int, range]]:
        """Yield every cut with all types as that of the stage's quickest replica."""
        for cut in range(self._intervals.count):
            yield cut, self._options

    def frontier(self, table: FloatArray, step: int) -> _Frontier | None:
        """Return the undominated states that leave room for the work after a cut."""
        row = table[step]
        least = np.minimum.accumulate(row)
        best = np.append(True, row[1:] < least[:-1])
        best &= row <= self.limit_s - self._intervals.beyond_s[step]
        alive = np.flatnonzero(best & (self._left >= self._work_left[step]))
        return _Frontier(step, alive, row[alive]) if len(alive) else None

    def least_s(self, table: FloatArray) -> float:
        """Return the least value of all layers in stages."""
        return float(table[-1].min())

    def extend(self, table: FloatArray, frontier: _Frontier, option: int) -> None:
        """Add a stage whose quickest replica is of a type, from the frontier's cut to every end."""
        cut = frontier.cut
        work = self._figures.types[option].work_s[cut, cut + 1 :]
        ends = int(np.searchsorted(work, self.limit_s, side="right"))
        if not ends:
            return
        columns = slice(cut + 1, cut + 1 + ends)
        spent, new = self._offers(frontier, option, columns)
        good = (spent <= self._most) & (new <= self.limit_s)
        end = np.broadcast_to(np.arange(columns.start, columns.stop), spent.shape)
        np.minimum.at(table, (end[good], spent[good]), new[good])

    # --- reconstruction ----------------------------------------------------------------------

    def best(self, table: FloatArray) -> tuple[int, int]:
        """Return the last cut and the amount spent of the least value."""
        return self._intervals.count, int(table[-1].argmin())

    def is_start(self, state: tuple[int, int]) -> bool:
        """Return whether no layer is in a stage."""
        return state[0] == 0

    def passes_to(self, state: tuple[int, int]) -> Iterator[tuple[int, range]]:
        """Yield the cuts before, the last one first."""
        for cut in reversed(range(state[0])):
            yield cut, self._options

    def last_stage(
        self, table: FloatArray, frontier: _Frontier, option: int, state: tuple[int, int]
    ) -> tuple[RelaxedStage, tuple[int, int]] | None:
        """Return the stage that begins at the frontier's cut, if it led to the state."""
        end, spent = state
        cost, new = self._offers(frontier, option, slice(end, end + 1))
        match = (cost[:, 0] == spent) & (new[:, 0] == table[end, spent])
        if not match.any():
            return None
        which = int(match.argmax())
        chosen, replicas = self._cheapest(frontier, which, option, end)
        stage = RelaxedStage(frontier.cut, end, option, chosen, replicas)
        return stage, (frontier.cut, int(frontier.alive[which]))

    def _cheapest(
        self, frontier: _Frontier, which: int, option: int, end: int
    ) -> tuple[int, float]:
        """Return the type that carries a stage at the least price, and how many of it."""
        place = slice(which, which + 1)
        single = _Frontier(frontier.cut, frontier.alive[place], frontier.spent_s[place])
        _, most = self._room(single, option, slice(end, end + 1))
        each = [self._price[j] / n if n else np.inf for j, n in enumerate(most[:, 0, 0])]
        chosen = int(np.argmin(each))
        return chosen, self._intervals.microbatches / float(most[chosen, 0, 0])

    # --- what a stage costs ------------------------------------------------------------------

    def _offers(
        self, frontier: _Frontier, option: int, columns: slice
    ) -> tuple[IntArray, FloatArray]:
        """Return the amount then spent, and the value after the stage, by state and its end."""
        value, most = self._room(frontier, option, columns)
        too_much = self._step * (self._most + 1)
        cost = np.minimum(self._least_cost(most, option), too_much) // self._step
        spent = frontier.alive[:, None] + cost.astype(int)
        return spent, value + self._figures.types[option].path_s[frontier.cut, columns]

    def _room(
        self, frontier: _Frontier, option: int, columns: slice
    ) -> tuple[FloatArray, FloatArray]:
        """Return what a stage begins with, and what a replica of each type can do besides.

        That is the head and tail of the stage, or its head alone.
        """
        figures, intervals, cut = self._figures, self._intervals, frontier.cut
        step = figures.step_s[cut, columns]
        send = figures.send_s[option][cut, columns] if cut else np.zeros_like(step)
        arrival = frontier.spent_s[:, None] + send
        most = self._within_limit(cut, columns, option, arrival, step)
        replicas = -(-intervals.microbatches // np.maximum(most.max(axis=0), 1)).astype(int)
        replicas = np.minimum(replicas, figures.links.count)
        inside, apart = (bytes_[cut, columns] for bytes_ in intervals.reduced_bytes)
        # With tied gradients at least one device of another stage takes part.
        further = np.minimum(replicas + 1, figures.links.count)
        end = step + figures.exposed_s(replicas, inside, cut, columns)
        end = end + figures.all_reduce_s(further, apart)
        most = self._within_limit(cut, columns, option, arrival, end)
        if figures.program == "head":
            return arrival, most
        own = figures.intervals.head_s[cut] + figures.types[option].weight_s[cut, columns] + end
        return np.maximum(arrival, own), most

    def _within_limit(
        self, cut: int, columns: slice, k: int, arrival: FloatArray, end: FloatArray
    ) -> FloatArray:
        """Return what one replica of each type can do if all has ended when the limit comes.

        Args:
            cut: where the stage begins.
            columns: where it may end.
            k: type of the quickest replica.
            arrival: value of the stage before its own end, by state and end.
            end: reduction and optimizer step.
        """
        figures = self._figures
        if figures.program == "head":
            return self._most_microbatches(cut, columns, k, self.limit_s - arrival - end)
        own = figures.intervals.head_s[cut] + end
        tail = np.maximum(arrival, own + figures.types[k].weight_s[cut, columns])
        most = self._most_microbatches(cut, columns, k, self.limit_s - tail)
        if not figures.chain.splits:
            return most
        # All work comes before the stage's own end.
        whole = self._most_microbatches(cut, columns, k, self.limit_s - own, weights=True)
        return np.minimum(most, whole)

    def _most_microbatches(
        self, cut: int, columns: slice, k: int, seconds: FloatArray, *, weights: bool = False
    ) -> FloatArray:
        """Return what one replica of each type can do in the time, with one of type k the quickest.

        Args:
            cut: where the stage begins.
            columns: where it may end.
            k: type of the quickest replica.
            seconds: the time.
            weights: count all work, not only what the program counts.

        Returns:
            By type, state and end; 0 for types that may not take part.
        """
        types, count = self._figures.types, self._intervals.microbatches
        seconds, rows = np.atleast_2d(seconds), []
        for other, figures in enumerate(types):
            spans = (figures.spans if weights else figures.load_spans)[cut, columns]
            allowed = types[k].partners[other][cut, columns] & figures.fits[cut, columns]
            rows.append(np.where(allowed, spans.most(seconds, count), 0.0))
        return np.array(rows)

    def _least_cost(self, most: FloatArray, k: int) -> FloatArray:
        """Return the price of replicas that run all microbatches, one of type k at least."""
        count, price = self._intervals.microbatches, self._price
        if not self._figures.replication:
            return np.where(most[k] >= count, float(price[k]), np.inf)
        with np.errstate(divide="ignore"):
            each = np.where(most > 0, price[:, None, None] / most, np.inf)
        cost = np.ceil(each.min(axis=0) * count / ROUNDING)
        return np.where(most[k] > 0, np.maximum(cost, price[k]), np.inf)
