"""What memory takes: how many microbatches may be in flight, and what they have to run again.

A device with k microbatches in flight at some moment holds k stashes then. Layers that run again
keep less, and each of them costs a forward a microbatch. How much of that is needed at least is a
knapsack; with parts of layers allowed it has a closed form for every price of a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.model.graph_record import Boundary, Layer
from planner.verification.proof.layers import FloatArray, ProvedIntervals

EXACT, GROWTH = 6, 1.3
"""Every number of microbatches in flight is a level up to the first, beyond it some are."""
MOST_PRICES = 64
"""Prices of a byte that are looked at; any of them gives a bound."""


class ProvedMemoryLevel(NamedTuple):
    """What it takes to have many microbatches in flight.

    Attributes:
        in_flight: so many at most, and more than on the level before.
        again_s: that a microbatch spends at least on layers that run again, by begin and end;
            infinite if that does not make room enough.
    """

    in_flight: int
    again_s: FloatArray


class ProvedMemory:
    """Levels of microbatches in flight by type of device.

    Args:
        intervals: of the layers.
    """

    def __init__(self, intervals: ProvedIntervals) -> None:
        self._intervals, self._layers = intervals, intervals.layers
        self._stash = np.array([float(row.stash_bytes) for row in self._layers.rows])
        self._saving = self._stash - intervals.kept_bytes

    @cached_property
    def levels(self) -> list[list[ProvedMemoryLevel]]:
        """Levels of each type; none where every number of microbatches fits.

        Of those whose stashes are on the host any number may be in flight.
        """
        if self._layers.space.offload:
            return [[] for _ in self._layers.types]
        return [list(self._of_type(k)) for k in range(len(self._layers.types))]

    def _of_type(self, kind: int) -> Iterator[ProvedMemoryLevel]:
        numbers = [*_numbers(self._layers.microbatches), self._layers.microbatches + 1]
        if not self._needed(kind, numbers[-2]).any():
            return
        for number, following in pairwise(numbers):
            yield ProvedMemoryLevel(following - 1, self._again_s(kind, number))

    def _needed(self, kind: int, number: int) -> FloatArray:
        """Return the bytes that each of so many stashes is too large, by interval."""
        capacity = self._layers.costs.capacity_bytes(self._layers.types[kind])
        needed = self._stashes - (capacity - self._held) / number
        return np.where(self._intervals.is_stage, np.maximum(needed, 0.0), 0.0)

    def _again_s(self, kind: int, number: int) -> FloatArray:
        """Return the least seconds of forwards that save enough of each stash."""
        needed = self._needed(kind, number)
        if not self._layers.space.recompute:
            return np.where(needed > 0, np.inf, 0.0)
        saved = np.maximum(needed - self._received_alone[:, None], 0.0)
        least = np.where(saved > self._intervals.sums(self._saving), np.inf, 0.0)
        cost = self._layers.again_s[kind]
        for price in self._prices(cost):
            gain = self._intervals.sums(np.maximum(price * self._saving - cost, 0.0))
            least = np.maximum(least, price * saved - gain)
        return least

    def _prices(self, cost: FloatArray) -> FloatArray:
        saves = self._saving > 0
        ratios = np.unique(cost[saves] / self._saving[saves])
        if len(ratios) > MOST_PRICES:
            ratios = np.quantile(ratios, np.linspace(0, 1, MOST_PRICES))
        return np.asarray(ratios)

    # --- bytes ------------------------------------------------------------------------------------

    @cached_property
    def _stashes(self) -> FloatArray:
        """One stash of each interval, nothing run again."""
        intervals, position = self._intervals, self._layers.position
        received = np.zeros(intervals.is_stage.shape)
        for tensor in self._layers.graph.boundaries:
            first, last = self._span(tensor)
            received[first : last + 1] += tensor.bytes
            if tensor.saved_by is not None:
                # Its saver's stash has it already.
                saver = position[tensor.saved_by]
                received[first : min(saver, last) + 1, saver + 1 :] -= tensor.bytes
        return intervals.sums(self._stash) + received

    def _span(self, tensor: Boundary) -> tuple[int, int]:
        """Return the first and the last cut that a tensor passes."""
        position = self._layers.position
        return position[tensor.producer] + 1, max(position[user] for user in tensor.users)

    @cached_property
    def _received_alone(self) -> FloatArray:
        """Received tensors that one layer uses and nobody saves, by cut: kept in any case.

        What that layer keeps if it runs again has them too.
        """
        totals = np.zeros(self._intervals.count)
        for tensor in self._layers.graph.boundaries:
            if tensor.saved_by is None and len(set(tensor.users)) == 1:
                first, last = self._span(tensor)
                totals[first : last + 1] += tensor.bytes
        return totals

    @cached_property
    def _held(self) -> FloatArray:
        """What is held besides while as many stashes as ever are, at least.

        Then a forward runs and makes what is sent; and the next backward, with the gradient that
        came and the one it makes. Operations of no length hold nothing that is seen.
        """
        forward = self._intervals.sums(self._layers.forward_s.min(axis=0)) > 0
        sent = np.where(forward, self._layers.crossing_bytes(gradients=False)[None, :], 0.0)
        return np.maximum(self._settled, self._intervals.static_bytes + self._workspace + sent)

    @cached_property
    def _settled(self) -> FloatArray:
        """The same while a backward runs alone."""
        back = self._layers.crossing_bytes(gradients=True)
        gradient = self._intervals.sums(self._layers.gradient_s.min(axis=0)) > 0
        both = np.where(gradient, back[:, None] + back[None, :], 0.0)
        return self._intervals.static_bytes + self._workspace + both

    @cached_property
    def _workspace(self) -> FloatArray:
        """What layers hold while they run, beyond whole stashes; at least."""
        rows = self._layers.rows
        kept = np.maximum(self._stash, [self._saved_inputs(row) for row in rows])
        before = np.concatenate([[0.0], np.cumsum(kept)])
        peaks = np.array([self._peak_bytes(row) for row in rows]) + before[:-1]
        table = np.zeros(self._intervals.is_stage.shape)
        for begin in range(len(rows)):
            most = np.maximum.accumulate(peaks[begin:])
            table[begin, begin + 1 :] = np.maximum(most - before[begin + 1 :], 0.0)
        return table

    def _saved_inputs(self, layer: Layer) -> float:
        return float(sum(t.bytes for t in self._used(layer) if t.saved_by == layer.name))

    def _used(self, layer: Layer) -> list[Boundary]:
        return [t for t in self._layers.graph.boundaries if layer.name in t.users]

    def _peak_bytes(self, layer: Layer) -> float:
        if layer.peak_bytes is not None:
            return float(layer.peak_bytes)
        graph = self._layers.graph
        made = sum(2 * t.bytes for t in graph.boundaries if t.producer == layer.name)
        sent_back = sum(t.bytes for t in self._used(layer) if t.requires_grad)
        trained = {row.name: row.bytes for row in graph.parameters if row.trainable}
        gradient = max((trained.get(name, 0) for name in layer.parameters), default=0)
        return float(layer.stash_bytes + layer.again_bytes + made + sent_back + gradient)


def _numbers(count: int) -> Iterator[int]:
    number = 1
    while number <= count:
        yield number
        number = number + 1 if number < EXACT else int(number * GROWTH) + 1
