"""Whether stages keep a time on devices that a budget pays for: for hundreds of devices.

As :mod:`planner.verification.proof.program`, but a state is a cut and an amount spent: a device of
each type has a price, all of the cluster together cost 1, and a stage takes at least what its
cheapest replicas cost. Every device may use the best links of the cluster. Amounts are whole steps
of a grid, rounded down.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.anywhere import AnyDevices
from planner.verification.proof.layers import (
    BoolArray,
    FloatArray,
    IntArray,
    ProvedIntervals,
    before_last,
)
from planner.verification.proof.links import FAR
from planner.verification.proof.program import MARGIN, Counted
from planner.verification.proof.rules import fewest, trips

STEPS = 2_000
"""Steps of the grid, for the whole budget."""
MOST_WORK = 1e8
"""Stages of all amounts, times pairs of types, that may be looked at for one time."""


def require_few_amounts(intervals: ProvedIntervals) -> None:
    """Refuse layers for which a pass takes too long.

    Raises:
        PipeplanError: if there are too many stages of all amounts, for each pair of types.
    """
    types = len(intervals.layers.types)
    # Few amounts are left at a cut that are worth anything.
    work = intervals.count**2 / 2 * STEPS / 4 * types**2
    if work > MOST_WORK:
        raise PipeplanError(
            f"certificate: {intervals.layers.length} layers on {types} types of devices are too "
            "many to check"
        )


class Budget:
    """The passes of one problem.

    Args:
        intervals: of its layers.
        links: of its devices, wherever they are.
        prices: of a device by type, all devices together costing 1.
    """

    def __init__(self, intervals: ProvedIntervals, links: AnyDevices, prices: FloatArray) -> None:
        self.intervals, self.layers, self.links, self.prices = (
            intervals,
            intervals.layers,
            links,
            prices,
        )
        layers = self.layers
        self.forward_s, self.gradient_s, self.backward_s, self.weight_s = (
            np.array([intervals.sums(row) for row in figure])
            for figure in (layers.forward_s, layers.gradient_s, layers.backward_s, layers.weight_s)
        )
        self.fits = np.array(intervals.fits_type)
        widths = [layers.cluster.device_types[name].optimizer_gb_per_s for name in layers.types]
        self.step_s = intervals.optimizer_bytes / (max(widths) * 1e9)
        way = layers.on_fastest(layers.forward_s + layers.gradient_s)
        self.rest_s = np.concatenate([np.cumsum(way[::-1])[::-1], [0.0]])
        there, back = (layers.crossing_bytes(gradients=g) for g in (False, True))
        for row in (there, back):
            row[0] = row[-1] = 0.0
        self.there_s, self.back_s = links.message_s(there), links.message_s(back)
        self.ahead_s = self.rest_s + self.there_s + self.back_s
        before = np.concatenate([[0.0], np.cumsum(layers.on_fastest(layers.forward_s))])
        self.head_s = before + self.there_s

    def rest_of_all_s(self, back_s: FloatArray) -> FloatArray:
        """Return what has to follow a cut at least, by cut and amount spent before it.

        A microbatch's way, or all the work there: what is left of the budget pays for it.

        Args:
            back_s: that each microbatch takes besides its forward, by type and layer.
        """
        layers = self.layers
        paid = layers.on_fastest(self.prices[:, None] * (layers.forward_s + back_s))
        needed = layers.microbatches * np.concatenate([np.cumsum(paid[::-1])[::-1], [0.0]])
        left = np.maximum(1 - np.arange(STEPS + 1) / STEPS, 1 / FAR)
        rest = needed[:, None] / left
        return np.asarray(np.minimum(np.maximum(rest, self.rest_s[:, None]), FAR))

    @cached_property
    def partners(self) -> BoolArray:
        """Types that are no quicker than another one: that one, type, cuts."""
        way = self.forward_s + self.gradient_s
        return np.asarray(way[None] >= way[:, None] * (1 - 1e-12))

    def refutes(self, time_s: float) -> bool:
        """Return whether no sequence of stages that the budget pays for keeps a time."""
        passes: tuple[Counted, ...] = ("way", "work") if self.layers.space.splits else ("way",)
        return any(_BudgetPass(self, time_s * MARGIN, counted).refutes() for counted in passes)


class _BudgetPass:
    """One pass for one time.

    Args:
        budget: of the problem.
        limit_s: to keep.
        counted: what counts.
    """

    def __init__(self, budget: Budget, limit_s: float, counted: Counted) -> None:
        self._budget, self._limit_s, self._back = budget, limit_s, counted == "way"
        self._count = budget.intervals.count
        layers = budget.layers
        back_s = layers.gradient_s if self._back else layers.backward_s
        self._rest_s = budget.rest_of_all_s(back_s)
        self._table = np.full((self._count, STEPS + 1), np.inf)
        self._table[0, 0] = 0.0

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        for cut in range(self._count - 1):
            amounts = self._worth(cut)
            for quickest in range(len(self._budget.layers.types)) if len(amounts) else ():
                self._extend(cut, amounts, quickest)
        return bool(self._table[-1].min() > self._limit_s)

    def _worth(self, cut: int) -> IntArray:
        """Return the amounts at a cut for which no lesser one is as good."""
        row = self._table[cut]
        least = np.concatenate([[np.inf], np.minimum.accumulate(row)[:-1]])
        return np.flatnonzero((row < least) & (row + self._rest_s[cut] <= self._limit_s))

    def _extend(self, cut: int, amounts: IntArray, quickest: int) -> None:
        """Note what is reached by a stage whose quickest replica is of a type, for every end."""
        budget, ends = self._budget, (cut, slice(cut + 1, None))
        message_s = budget.there_s[cut] + (budget.back_s[cut] if self._back else 0.0)
        arrival = (self._table[cut, amounts] + message_s)[:, None]
        partners = budget.partners[quickest][(slice(None), *ends)]
        fits = budget.fits[(slice(None), *ends)] & partners
        forward, gradient, weight = (
            np.where(partners, figure[(slice(None), *ends)], np.inf).min(axis=0)
            for figure in (budget.forward_s, budget.gradient_s, budget.weight_s)
        )
        reduction = np.zeros((len(amounts), len(forward)))
        most, _ = self._most(ends, arrival, weight, reduction, fits)
        reduction = self._reduction_s(ends, most.max(axis=0))
        most, spent = self._most(ends, arrival, weight, reduction, fits)
        cost = np.floor(self._cost(most, quickest) * STEPS / MARGIN)
        value = spent + forward + gradient if self._back else arrival + forward
        after = amounts[:, None] + np.minimum(cost, 2 * STEPS).astype(np.int64)
        rest = self._rest_s[np.arange(cut + 1, self._count), np.minimum(after, STEPS)]
        row, column = np.nonzero((after <= STEPS) & (value + rest <= self._limit_s))
        place = (cut + 1 + column, after[row, column])
        np.minimum.at(self._table, place, np.broadcast_to(value, after.shape)[row, column])

    def _reduction_s(self, ends: tuple[int, slice], most: FloatArray) -> FloatArray:
        """Return all-reduces of a stage of as few replicas as can run all microbatches."""
        budget, count = self._budget, self._budget.layers.microbatches
        replicas = np.ceil(count / np.maximum(most, 1)).astype(np.int64)
        own = budget.links.all_reduce_s(replicas, budget.intervals.own_gradient_bytes[ends])
        shared = budget.intervals.shared_gradient_bytes[ends]
        joint = budget.links.all_reduce_s(replicas + 1, shared)
        if budget.layers.space.overlap_reduction:
            # It begins when the last backward has run the stage's last layer.
            earlier = before_last(budget.backward_s.max(axis=0))[ends]
            own = np.maximum(own - earlier, 0.0)
        return np.minimum(own + joint, FAR)

    def _most(
        self,
        ends: tuple[int, slice],
        arrival: FloatArray,
        weight: FloatArray,
        reduction: FloatArray,
        fits: BoolArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return what a replica of each type can run, and what is spent before and after that.

        Args:
            ends: the cut and those after it.
            arrival: value at the cut with its messages, by amount.
            weight: least weights after the last gradient, by end.
            reduction: after the last backward, by amount and end.
            fits: by type and end.
        """
        budget = self._budget
        end = reduction + budget.step_s[ends]
        before = budget.head_s[ends[0]] if self._back else arrival
        spent = np.maximum(arrival, before + weight + end) if self._back else arrival + end
        ahead = budget.ahead_s[ends[1]]
        rows = []
        for k in range(len(fits)):
            forward, backward = budget.forward_s[k][ends], budget.backward_s[k][ends]
            rules = list(trips(self._limit_s - before - end, forward, backward, ahead))
            if self._back:
                gradient = budget.gradient_s[k][ends]
                rules += trips(self._limit_s - spent, forward, gradient, ahead)
            counts = fewest(rules, budget.layers.microbatches)
            rows.append(np.where(fits[k], np.maximum(counts, 0.0), 0.0))
        return np.array(rows), spent

    def _cost(self, most: FloatArray, quickest: int) -> FloatArray:
        """Return the least price of replicas that run all microbatches, the quickest one among."""
        budget, price = self._budget, self._budget.prices
        count = budget.layers.microbatches
        if not budget.layers.space.replication:
            return np.where(most[quickest] >= count, price[quickest], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(most > 0, price[:, None, None] / most, np.inf)
        cost = np.maximum(each.min(axis=0) * count, price[quickest])
        return np.where(most[quickest] > 0, cost, np.inf)


def typed_prices(
    prices: dict[str, float], types: list[str], counts: IntArray | FloatArray
) -> FloatArray:
    """Return prices by type, so many devices of each together costing 1.

    Raises:
        PipeplanError: if they are not of the types in use, or all nothing.
    """
    if set(prices) != set(types):
        raise PipeplanError(
            f"argument.prices: of {', '.join(sorted(prices))}, but the cluster has "
            f"{', '.join(sorted(types))}"
        )
    most = max(prices.values())
    if most <= 0:
        raise PipeplanError("argument.prices: all of them are 0, which proves nothing")
    row = np.array([prices[name] for name in types]) / most
    return np.asarray(row / float((row * counts).sum()))
