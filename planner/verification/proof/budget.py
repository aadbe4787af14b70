"""Whether stages keep a time on devices that a budget pays for: for hundreds of devices.

A state is a cut and an amount spent: a device of each type has a price, all of the cluster together
cost 1, and a stage takes at least what its cheapest replicas cost. Every device may use the best
links of the cluster. Amounts are whole steps of a grid, rounded down. The least value of a state is
the sum of what has to pass before the next stage's first forward and of what has to follow its last
gradient, as in :mod:`planner.verification.proof.classes`.
"""

from __future__ import annotations

import numpy as np

from planner.errors import PipeplanError
from planner.verification.proof.figures import (
    FAR,
    MARGIN,
    BoolArray,
    Figures,
    FloatArray,
    IntArray,
    Seconds,
)
from planner.verification.proof.links import AnyLinks
from planner.verification.proof.terms import fewest, round_trips

STEPS = 2_000
"""Steps of the grid, for the whole budget."""
MOST_WORK = 1e8
"""Stages of all amounts, times pairs of types, that may be looked at for one time."""


def require_few_amounts(figures: Figures) -> None:
    """Refuse layers for which a pass takes too long.

    Raises:
        PipeplanError: if there are too many stages of all amounts, for each pair of types.
    """
    # Few amounts are left at a cut that are worth anything.
    work = (len(figures.layers) + 1) ** 2 / 2 * STEPS / 4 * len(figures.types) ** 2
    if work > MOST_WORK:
        raise PipeplanError(
            f"certificate: {len(figures.layers)} layers on {len(figures.types)} types of devices "
            "are too many to check"
        )


class BudgetPass:
    """One pass for one time.

    Args:
        figures: of the layers.
        links: of the devices, wherever they are.
        prices: of a device by type, all devices together costing 1.
        limit_s: to keep.
        back: whether forwards, gradients and the way of the last gradient back count; otherwise
            all work does, and no way back.
    """

    def __init__(
        self, figures: Figures, links: AnyLinks, prices: FloatArray, limit_s: float, back: bool
    ) -> None:
        self._figures, self._links, self._prices = figures, links, prices
        self._limit_s, self._back = limit_s, back
        self._step_s = figures.step_s.min(axis=0)
        layer, self._rows = figures.of_layer, figures.of_interval
        fastest_s = figures.on_fastest(layer.forward + layer.gradient)
        bytes_ = figures.sent_bytes, figures.returned_bytes
        there, home = map(links.message_s, bytes_)
        each = np.array([links.message_at_s(figures.types, row) for row in bytes_])
        self._waits_s = figures.waits_s(each, each)
        self._message_s = there + home if back else there
        self._ahead_s = _behind(fastest_s) + there + home
        before_s = np.insert(np.cumsum(figures.on_fastest(layer.forward)), 0, 0.0)
        self._head_s = before_s + there
        # What has to follow a cut, by amount spent before it: a microbatch's way, or all the work
        # there, which what is left of the budget pays for.
        each_s = layer.forward + (layer.gradient if back else layer.backward)
        paid = figures.microbatches * _behind(figures.on_fastest(prices[:, None] * each_s))
        left = np.maximum(1 - np.arange(STEPS + 1) / STEPS, 1 / FAR)
        rest_s = np.maximum(paid[:, None] / left, _behind(fastest_s)[:, None])
        self._rest_s = np.minimum(rest_s, FAR)
        self._table = np.full((len(paid), STEPS + 1), np.inf)
        self._table[0, 0] = 0.0

    def refutes(self) -> bool:
        """Return whether the end is not reached within the limit."""
        for cut, row in enumerate(self._table[:-1]):
            # No amount is worth anything for which a lesser one is as good.
            least = np.concatenate([[np.inf], np.minimum.accumulate(row)[:-1]])
            amounts = np.flatnonzero((row < least) & (row + self._rest_s[cut] <= self._limit_s))
            for quickest in range(len(self._prices)) if len(amounts) else ():
                self._extend(cut, amounts, quickest)
        return bool(self._table[-1].min() > self._limit_s)

    def _extend(self, cut: int, amounts: IntArray, quickest: int) -> None:
        """Note what is reached by a stage whose quickest replica is of a type, for every end."""
        seconds = Seconds(*(row[:, cut, cut + 1 :] for row in self._rows))
        arrival = (self._table[cut, amounts] + self._message_s[cut])[:, None]
        # The other replicas are of types that are no quicker.
        way = seconds.forward + seconds.gradient
        partners = way >= way[quickest] * (1 - 1e-12)
        least = Seconds(*(np.where(partners, row, np.inf).min(axis=0) for row in seconds))
        fits = self._figures.fits[:, cut, cut + 1 :] & partners
        # The reduction of as few replicas as can run all microbatches.
        most, _ = self._most(cut, arrival, least.weight, np.zeros(least.weight.shape), fits)
        reduction = self._reduction_s(cut, most.max(axis=0))
        most, spent = self._most(cut, arrival, least.weight, reduction, fits)
        cost = np.floor(self._cost(most, quickest) * STEPS / MARGIN)
        value = spent + least.forward + least.gradient if self._back else arrival + least.forward
        after = amounts[:, None] + np.minimum(cost, 2 * STEPS).astype(int)
        ends = np.arange(cut + 1, len(self._table))
        rest_s = self._rest_s[ends, np.minimum(after, STEPS)]
        row, column = np.nonzero((after <= STEPS) & (value + rest_s <= self._limit_s))
        place = ends[column], after[row, column]
        np.minimum.at(self._table, place, np.broadcast_to(value, after.shape)[row, column])

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
        end = reduction + self._step_s[cut, cut + 1 :]
        before = self._head_s[cut] if self._back else arrival
        spent = np.maximum(arrival, before + weight + end) if self._back else arrival + end
        ahead, found = self._ahead_s[cut + 1 :], []
        for kind, may_run in enumerate(fits):
            seconds = Seconds(*(row[kind, cut, cut + 1 :] for row in self._rows))
            waits = self._waits_s[0, kind, cut], self._waits_s[1, kind, cut + 1 :]
            spare = self._limit_s - before - end
            terms = round_trips(spare, seconds.forward, seconds.backward, ahead, waits)
            if self._back:
                spare = self._limit_s - spent
                terms += round_trips(spare, seconds.forward, seconds.gradient, ahead, waits)
            counts = fewest(terms, self._figures.microbatches)
            found.append(np.where(may_run, np.maximum(counts, 0.0), 0.0))
        return np.array(found), spent

    def _reduction_s(self, cut: int, most: FloatArray) -> FloatArray:
        """Return all-reduces of stages, by amount and end.

        Args:
            cut: before them.
            most: microbatches that a replica can run, by amount and end.
        """
        replicas = np.ceil(self._figures.microbatches / np.maximum(most, 1)).astype(int)
        own, shared = (row[cut, cut + 1 :] for row in self._figures.parameters[:2])
        own_s = self._links.all_reduce_s(replicas, own)
        if self._figures.space.overlap_reduction:
            # It begins when the last backward has run the stage's last layer.
            earlier = self._rows.backward.max(axis=0)[cut, cut:-1]
            own_s = np.maximum(own_s - earlier, 0.0)
        return np.minimum(own_s + self._links.all_reduce_s(replicas + 1, shared), FAR)

    def _cost(self, most: FloatArray, quickest: int) -> FloatArray:
        """Return the least price of replicas that run all microbatches, the quickest one among."""
        price, count = self._prices, self._figures.microbatches
        if not self._figures.space.replication:
            return np.where(most[quickest] >= count, price[quickest], np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(most > 0, price[:, None, None] / most, np.inf)
        cost = np.maximum(each.min(axis=0) * count, price[quickest])
        return np.where(most[quickest] > 0, cost, np.inf)


def _behind(per_layer: FloatArray) -> FloatArray:
    """Return the sum of a figure over all layers behind each cut."""
    return np.append(np.cumsum(per_layer[::-1])[::-1], 0.0)
