"""Whether stages keep a time on devices that a budget pays for: for hundreds of devices.

As :mod:`planner.verification.proof.program`, but a state is a cut and an amount spent: a device of
each type has a price, all of the cluster together cost 1, and a stage takes at least what its
cheapest replicas cost. Every device may use the best links of the cluster. Amounts are whole steps
of a grid, rounded down.
"""

from __future__ import annotations

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
from planner.verification.proof.program import Counted
from planner.verification.proof.rules import MARGIN, fewest, trips

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
            f"certificate: {intervals.count - 1} layers on {types} types of devices are too "
            "many to check"
        )


class BudgetPass:
    """One pass for one time.

    Args:
        intervals: of the problem's layers.
        links: of its devices, wherever they are.
        prices: of a device by type, all devices together costing 1.
        limit_s: to keep.
        counted: what counts.
    """

    def __init__(
        self,
        intervals: ProvedIntervals,
        links: AnyDevices,
        prices: FloatArray,
        limit_s: float,
        counted: Counted,
    ) -> None:
        self._intervals, self._layers, self._links = intervals, intervals.layers, links
        self._prices, self._limit_s, self._back = prices, limit_s, counted == "way"
        layers = self._layers
        self._step_s = intervals.step_s.min(axis=0)
        self._way_s = intervals.forward_s + intervals.gradient_s
        rest = _behind(layers.on_fastest(layers.forward_s + layers.gradient_s))
        there, back = map(links.message_s, (layers.sent_bytes, layers.returned_bytes))
        self._message_s = there + back if self._back else there
        self._ahead_s = rest + there + back
        before = np.concatenate([[0.0], np.cumsum(layers.on_fastest(layers.forward_s))])
        self._head_s = before + there
        self._rest_s = self._rest_of_all_s(rest)
        self._table = np.full((intervals.count, STEPS + 1), np.inf)
        self._table[0, 0] = 0.0

    def _rest_of_all_s(self, way_s: FloatArray) -> FloatArray:
        """Return what has to follow a cut at least, by cut and amount spent before it.

        A microbatch's way, or all the work there: what is left of the budget pays for it.
        """
        layers = self._layers
        each_s = layers.forward_s + (layers.gradient_s if self._back else layers.backward_s)
        needed = layers.microbatches * _behind(layers.on_fastest(self._prices[:, None] * each_s))
        left = np.maximum(1 - np.arange(STEPS + 1) / STEPS, 1 / FAR)
        rest = np.maximum(needed[:, None] / left, way_s[:, None])
        return np.asarray(np.minimum(rest, FAR))

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        for cut in range(self._intervals.count - 1):
            amounts = self._worth(cut)
            for quickest in range(len(self._prices)) if len(amounts) else ():
                self._extend(cut, amounts, quickest)
        return bool(self._table[-1].min() > self._limit_s)

    def _worth(self, cut: int) -> IntArray:
        """Return the amounts at a cut for which no lesser one is as good."""
        row = self._table[cut]
        least = np.concatenate([[np.inf], np.minimum.accumulate(row)[:-1]])
        return np.flatnonzero((row < least) & (row + self._rest_s[cut] <= self._limit_s))

    def _extend(self, cut: int, amounts: IntArray, quickest: int) -> None:
        """Note what is reached by a stage whose quickest replica is of a type, for every end."""
        rows, ends = self._intervals, (slice(None), cut, slice(cut + 1, None))
        arrival = (self._table[cut, amounts] + self._message_s[cut])[:, None]
        # The other replicas are of types that are no quicker.
        partners = self._way_s[ends] >= self._way_s[quickest][ends[1:]] * (1 - 1e-12)
        forward, gradient, weight = (
            np.where(partners, figure[ends], np.inf).min(axis=0)
            for figure in (rows.forward_s, rows.gradient_s, rows.weight_s)
        )
        fits = rows.fits[ends] & partners
        most, _ = self._most(cut, arrival, weight, np.zeros((len(amounts), len(forward))), fits)
        reduction = self._reduction_s(cut, most.max(axis=0))
        most, spent = self._most(cut, arrival, weight, reduction, fits)
        cost = np.floor(self._cost(most, quickest) * STEPS / MARGIN)
        value = spent + forward + gradient if self._back else arrival + forward
        after = amounts[:, None] + np.minimum(cost, 2 * STEPS).astype(np.int64)
        rest = self._rest_s[np.arange(cut + 1, rows.count), np.minimum(after, STEPS)]
        row, column = np.nonzero((after <= STEPS) & (value + rest <= self._limit_s))
        place = (cut + 1 + column, after[row, column])
        np.minimum.at(self._table, place, np.broadcast_to(value, after.shape)[row, column])

    def _reduction_s(self, cut: int, most: FloatArray) -> FloatArray:
        """Return all-reduces of stages of as few replicas as can run all microbatches."""
        rows, ends = self._intervals, (cut, slice(cut + 1, None))
        replicas = np.ceil(self._layers.microbatches / np.maximum(most, 1)).astype(np.int64)
        own = self._links.all_reduce_s(replicas, rows.own_gradient_bytes[ends])
        joint = self._links.all_reduce_s(replicas + 1, rows.shared_gradient_bytes[ends])
        if self._layers.space.overlap_reduction:
            # It begins when the last backward has run the stage's last layer.
            earlier = before_last(rows.backward_s.max(axis=0))[ends]
            own = np.maximum(own - earlier, 0.0)
        return np.minimum(own + joint, FAR)

    def _most(
        self,
        cut: int,
        arrival: FloatArray,
        weight: FloatArray,
        reduction: FloatArray,
        fits: BoolArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return what a replica of each type can run, and what is spent before and after that.

        Args:
            cut: before the stages.
            arrival: value at the cut with its messages, by amount.
            weight: least weights after the last gradient, by end.
            reduction: after the last backward, by amount and end.
            fits: by type and end.
        """
        ends, rows = (cut, slice(cut + 1, None)), self._intervals
        end = reduction + self._step_s[ends]
        before = self._head_s[cut] if self._back else arrival
        spent = np.maximum(arrival, before + weight + end) if self._back else arrival + end
        ahead, found = self._ahead_s[ends[1]], []
        for kind, may_run in enumerate(fits):
            forward = rows.forward_s[kind][ends]
            rules = trips(self._limit_s - before - end, forward, rows.backward_s[kind][ends], ahead)
            if self._back:
                gradient = rows.gradient_s[kind][ends]
                rules += trips(self._limit_s - spent, forward, gradient, ahead)
            counts = fewest(rules, self._layers.microbatches)
            found.append(np.where(may_run, np.maximum(counts, 0.0), 0.0))
        return np.array(found), spent

    def _cost(self, most: FloatArray, quickest: int) -> FloatArray:
        """Return the least price of replicas that run all microbatches, the quickest one among."""
        price, count = self._prices, self._layers.microbatches
        if not self._layers.space.replication:
            return np.where(most[quickest] >= count, price[quickest], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(most > 0, price[:, None, None] / most, np.inf)
        cost = np.maximum(each.min(axis=0) * count, price[quickest])
        return np.where(most[quickest] > 0, cost, np.inf)


def _behind(per_layer: FloatArray) -> FloatArray:
    """Return the sum of a figure over all layers behind each cut."""
    return np.concatenate([np.cumsum(per_layer[::-1])[::-1], [0.0]])
