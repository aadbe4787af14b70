"""The largest time that no sequence of stages keeps on devices that a budget pays for.

For hundreds of devices: a state is a cut and an amount spent. A device of each type has a price,
all devices together cost 1, and a stage costs at least what its cheapest replicas do. Every device
may use the best links of the cluster. Amounts are whole steps of a grid, rounded down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from planner.bounds.class_pass import round_trips
from planner.bounds.classes import MARGIN
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FAR, BoolArray, FloatArray, prefix
from planner.bounds.links import AnyLinks
from planner.bounds.prices import DIGITS
from planner.errors import PipeplanError
from planner.plan.certificate import TypePrices
from planner.program.compiled import compiled, entry
from planner.units import significant

STEPS = 2_000
"""Steps of the grid, for the whole budget."""
MOST_WORK = 1e8
"""Stages of all amounts, times pairs of types, that are looked at for one time."""
SPREAD = 1.1
"""The factor by which the price of a type is raised or lowered to see whether that proves more."""
MOST_LOOKED = 40_000
"""Stages after which no further prices are tried for one time."""


class BudgetArrays(NamedTuple):
    """Figures of stages for N layers, K types and up to R replicas.

    Attributes:
        microbatches: of an iteration.
        replication: whether a stage may have several devices.
        overlaps: whether reductions may overlap backwards.
        price: (K) of a device, all together costing 1.
        forward_s, gradient_s, backward_s, weight_s: (K, N + 1) running sums.
        fits: (K, N + 1, N + 1) whether a type may run an interval.
        step_s: (N + 1, N + 1) the optimizer step on the widest memory.
        there_s, back_s: (N + 1) messages at each cut.
        waits_s: (2, K, N + 1) of :meth:`LayerTable.waits_s`.
        head_s: (N + 1) least time before the first forward of a stage.
        ahead_s: (N + 1) least way of a microbatch behind a stage and back to it.
        rest_s: (2, N + 1, STEPS + 1) what has to follow a cut, by amount spent: of all work; of
            forwards and gradients.
        own_bytes, shared_bytes: (N + 1, N + 1) gradients that a stage reduces.
        joint_latency_s, joint_s_per_byte: (R + 2) of the worst link among so many devices.
    """

    microbatches: int
    replication: bool
    overlaps: bool
    price: FloatArray
    forward_s: FloatArray
    gradient_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    fits: BoolArray
    step_s: FloatArray
    there_s: FloatArray
    back_s: FloatArray
    waits_s: FloatArray
    head_s: FloatArray
    ahead_s: FloatArray
    rest_s: FloatArray
    own_bytes: FloatArray
    shared_bytes: FloatArray
    joint_latency_s: FloatArray
    joint_s_per_byte: FloatArray


class Budget:
    """Whether no sequence of stages keeps a time on devices that a budget pays for.

    Prices of types are moved to where they refute what those before did not.

    Args:
        intervals: of the problem's layers.

    Attributes:
        looked_at: stages that all passes have looked at so far.

    Raises:
        PipeplanError: if there are too many layers and types.
    """

    def __init__(self, intervals: IntervalTable) -> None:
        self._intervals, self._layers = intervals, intervals.layers
        layers, types = intervals.layers, len(intervals.layers.types)
        if intervals.cuts**2 / 2 * STEPS / 4 * types**2 > MOST_WORK:
            raise PipeplanError(
                f"bounds: {layers.count} layers on {types} types of devices are too many"
            )
        self._links = AnyLinks(layers.cluster)
        work = np.where(layers.may_run, layers.forward_s + layers.backward_s, 0.0)
        self._prices = 1 / np.maximum(work.sum(axis=1), 1e-30)
        self._turn, self.looked_at = 0, 0.0

    def refute(self, time_s: float) -> TypePrices | None:
        """Return prices by which no plan keeps a time: those before, or others near them."""
        for prices in self._near():
            share = prices / prices.max()
            named = {
                name: significant(float(price), DIGITS)
                for name, price in zip(self._layers.types, share, strict=True)
            }
            if self._refutes(named, time_s):
                self._prices = prices
                return TypePrices(prices=named)
        return None

    def _near(self) -> Iterator[FloatArray]:
        """Yield the prices so far, then these with that of one type raised or lowered, in turn."""
        yield self._prices
        types, begun_at = len(self._prices), self.looked_at
        moves = [(n, factor) for n in range(types) for factor in (1 / SPREAD, SPREAD)]
        for _ in moves if types > 1 else ():
            moved, (number, factor) = self._prices.copy(), moves[self._turn % len(moves)]
            moved[number] *= factor
            self._turn += 1
            yield moved
            if self.looked_at > begun_at + MOST_LOOKED:
                return

    def _refutes(self, prices: Mapping[str, float], time_s: float) -> bool:
        arrays = self.arrays(np.array([prices[name] for name in self._layers.types]))
        for both_ways in (True, False) if self._layers.space.splits else (True,):
            found, looked = _refutes(arrays, time_s * MARGIN, both_ways)
            self.looked_at += looked
            if found:
                return True
        return False

    def arrays(self, prices: FloatArray) -> BudgetArrays:
        """Return all figures for prices of a device by type."""
        layers, intervals = self._layers, self._intervals
        price = prices / float(prices.max())
        price = price / float((price * layers.counts).sum())
        bytes_ = np.array([layers.sent_bytes, layers.returned_bytes])
        there, back = self._links.message_s(bytes_)
        of_type = [self._links.message_s(bytes_, name) for name in layers.types]
        each = np.stack(of_type, axis=1)
        way = layers.fastest(layers.forward_s + layers.gradient_s)
        behind = np.concatenate([np.cumsum(way[::-1])[::-1], [0.0]])
        memory = [layers.cluster.device_types[name].optimizer_gb_per_s for name in layers.types]
        return BudgetArrays(
            layers.microbatches,
            layers.space.replication,
            layers.space.overlap_reduction,
            price,
            prefix(layers.forward_s),
            prefix(layers.gradient_s),
            prefix(layers.backward_s),
            prefix(layers.weight_s),
            intervals.fits,
            intervals.parameters.step / (max(memory) * 1e9),
            there,
            back,
            layers.waits_s(each, each),
            prefix(layers.fastest(layers.forward_s)) + there,
            behind + there + back,
            np.array(
                [self._rest_s(price, row, behind) for row in (layers.backward_s, layers.gradient_s)]
            ),
            intervals.parameters.own,
            intervals.parameters.shared,
            self._links.joint_latency_s,
            self._links.joint_s_per_byte,
        )

    def _rest_s(self, price: FloatArray, back_s: FloatArray, behind: FloatArray) -> FloatArray:
        """Return what has to follow a cut: its way, or work that what is left pays for."""
        layers = self._layers
        paid = layers.fastest(price[:, None] * (layers.forward_s + back_s))
        needed = layers.microbatches * np.concatenate([np.cumsum(paid[::-1])[::-1], [0.0]])
        left = np.maximum(1 - np.arange(STEPS + 1) / STEPS, 1 / FAR)
        return np.minimum(np.maximum(needed[:, None] / left, behind[:, None]), FAR)


@compiled
def _all_reduce_s(d: BudgetArrays, replicas: float, bytes_: float) -> float:
    """Return the least seconds of an all-reduce over so many devices at least."""
    if bytes_ <= 0 or replicas <= 1:
        return 0.0
    r = min(int(replicas), len(d.joint_s_per_byte) - 1)
    latency, inverse = d.joint_latency_s[r], d.joint_s_per_byte[r]
    ring = 2 * (r - 1) * (latency + bytes_ / r * inverse)
    return float(min(ring, 2 * np.ceil(np.log2(r)) * (latency + bytes_ * inverse), FAR))


@entry
def _refutes(d: BudgetArrays, limit_s: float, both_ways: bool) -> tuple[bool, int]:
    """Return whether no stages that the budget pays for keep a time, and how many it looked at."""
    cuts, types, count = len(d.there_s), len(d.price), d.microbatches
    ways = 1 if both_ways else 0
    table = np.full((cuts, STEPS + 1), np.inf)
    table[0, 0] = 0.0
    most = np.zeros(types)
    looked = 0
    for cut in range(cuts - 1):
        best = np.inf
        for amount in range(STEPS + 1):
            reached = table[cut, amount]
            if reached >= best or reached + d.rest_s[ways, cut, amount] > limit_s:
                continue
            best = reached
            arrival = reached + d.there_s[cut] + ways * d.back_s[cut]
            for quickest in range(types):
                for end in range(cut + 1, cuts):
                    way = _path(d, quickest, cut, end, 1)
                    forward, gradient, weight, least_s = np.inf, np.inf, np.inf, np.inf
                    earlier = 0.0
                    for k in range(types):
                        if _path(d, k, cut, end, 1) >= way * (1 - 1e-12):
                            forward = min(forward, d.forward_s[k, end] - d.forward_s[k, cut])
                            gradient = min(gradient, d.gradient_s[k, end] - d.gradient_s[k, cut])
                            weight = min(weight, d.weight_s[k, end] - d.weight_s[k, cut])
                        earlier = max(earlier, d.backward_s[k, end - 1] - d.backward_s[k, cut])
                        least_s = min(least_s, _path(d, k, cut, end, ways))
                    if arrival + least_s > limit_s:
                        break
                    path = forward + ways * gradient
                    looked += 1
                    reduction, spent = 0.0, 0.0
                    # Replicas that could run all if nothing were reduced tell what is.
                    for again in range(2):
                        fastest = 0.0
                        tail = reduction + d.step_s[cut, end]
                        first = d.head_s[cut] if both_ways else arrival
                        spent = arrival + tail
                        if both_ways:
                            spent = max(arrival, first + weight + tail)
                        for k in range(types):
                            most[k] = 0.0
                            slow = _path(d, k, cut, end, 1) >= way * (1 - 1e-12)
                            if d.fits[k, cut, end] and slow:
                                most[k] = _most(
                                    d, k, cut, end, limit_s, first + tail, spent, both_ways
                                )
                            fastest = max(fastest, most[k])
                        if fastest <= 0:
                            break
                        if again == 0:
                            replicas = np.ceil(count / fastest)
                            own = _all_reduce_s(d, replicas, d.own_bytes[cut, end])
                            if d.overlaps:
                                own = max(own - earlier, 0.0)
                            joint = _all_reduce_s(d, replicas + 1, d.shared_bytes[cut, end])
                            reduction = min(own + joint, FAR)
                    if most[quickest] <= 0 or (not d.replication and most[quickest] < count):
                        continue
                    cost = d.price[quickest]
                    if d.replication:
                        least = np.inf
                        for k in range(types):
                            if most[k] > 0:
                                least = min(least, d.price[k] / most[k])
                        cost = max(cost, least * count)
                    after = amount + int(min(np.floor(cost * STEPS / MARGIN), 2.0 * STEPS))
                    value = spent + path if both_ways else arrival + path
                    if after <= STEPS and value + d.rest_s[ways, end, after] <= limit_s:
                        table[end, after] = min(table[end, after], value)
    return table[cuts - 1].min() > limit_s, looked


@compiled
def _path(d: BudgetArrays, k: int, cut: int, end: int, ways: int) -> float:
    forward = d.forward_s[k, end] - d.forward_s[k, cut]
    return float(forward + ways * (d.gradient_s[k, end] - d.gradient_s[k, cut]))


@compiled
def _most(
    d: BudgetArrays,
    k: int,
    cut: int,
    end: int,
    limit_s: float,
    around_s: float,
    spent_s: float,
    both_ways: bool,
) -> float:
    """Return how many microbatches a device of a type can run."""
    forward = d.forward_s[k, end] - d.forward_s[k, cut]
    backward = d.backward_s[k, end] - d.backward_s[k, cut]
    before, behind, ahead = d.waits_s[0, k, cut], d.waits_s[1, k, end], d.ahead_s[end]
    most = round_trips(limit_s - around_s, forward, backward, ahead, before, behind)
    if both_ways:
        gradient = d.gradient_s[k, end] - d.gradient_s[k, cut]
        trips = round_trips(limit_s - spent_s, forward, gradient, ahead, before, behind)
        most = min(most, trips)
    return max(0.0, min(most, float(d.microbatches)))
