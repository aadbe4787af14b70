"""How many microbatches memory lets a device have in flight, and what they have to run again.

A device with k microbatches in flight at some moment holds k stashes then. Layers that run again
keep less, and each of them costs a forward a microbatch: the least cost is a knapsack, which has a
closed form for every price of a byte if parts of layers are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FloatArray

EXACT, GROWTH = 6, 1.3
"""Every number of microbatches in flight is a level up to the first, beyond it some are."""
MOST_PRICES = 64
"""Prices of a byte that are tried; each of them gives a bound."""


class MemoryTable:
    """Levels of microbatches in flight, by type of device.

    Args:
        intervals: of the layers.
    """

    def __init__(self, intervals: IntervalTable) -> None:
        self._intervals, self._layers = intervals, intervals.layers
        self._stash = np.array([float(row.stash_bytes) for row in self._layers.rows])
        self._saving = self._stash - intervals.kept_bytes

    @cached_property
    def levels(self) -> list[list[tuple[int, FloatArray]]]:
        """Levels of each type; none where all microbatches fit at once or go to the host.

        Of each the most microbatches in flight, and (N + 1, N + 1) the least seconds of layers that
        run again for a microbatch if more are in flight than on the level before; infinite if so
        many never fit.
        """
        if self._layers.space.offload:
            return [[] for _ in self._layers.types]
        return [list(self._of_type(name)) for name in self._layers.types]

    def _of_type(self, name: str) -> Iterator[tuple[int, FloatArray]]:
        most = self._layers.microbatches
        numbers = [*_numbers(most), most + 1]
        if self._excess(name, numbers[-2]).any():
            for number, following in pairwise(numbers):
                yield following - 1, self._again_s(name, number)

    def _excess(self, name: str, number: int) -> FloatArray:
        """Return the bytes by which each of so many stashes is too large, by interval."""
        capacity = self._layers.cluster.device_types[name].capacity_bytes
        excess = self._stashes - (capacity - self._held) / number
        return np.where(self._intervals.is_stage, np.maximum(excess, 0.0), 0.0)

    def _again_s(self, name: str, number: int) -> FloatArray:
        """Return the least seconds of forwards whose stashes make up for the excess."""
        excess = self._excess(name, number)
        if not self._layers.space.recompute:
            return np.where(excess > 0, np.inf, 0.0)
        saved = np.maximum(excess - self._received_by_one[:, None], 0.0)
        least = np.where(saved > self._intervals.sums(self._saving), np.inf, 0.0)
        cost = self._layers.again_s[self._layers.types.index(name)]
        for price in self._prices(cost):
            gain = self._intervals.sums(np.maximum(price * self._saving - cost, 0.0))
            np.maximum(least, price * saved - gain, out=least)
        return least

    def _prices(self, cost: FloatArray) -> FloatArray:
        saves = self._saving > 0
        ratios = np.unique(cost[saves] / self._saving[saves])
        if len(ratios) > MOST_PRICES:
            ratios = np.quantile(ratios, np.linspace(0, 1, MOST_PRICES))
        return np.asarray(ratios)

    @cached_property
    def _stashes(self) -> FloatArray:
        """One stash of each interval with what it receives, if nothing runs again."""
        received = np.zeros(self._intervals.is_stage.shape)
        for tensor in self._layers.record.boundaries:
            first, last = self._layers.span(tensor.producer, tensor.users)
            received[first : last + 1] += tensor.bytes
            if tensor.saved_by is not None:
                saver = self._layers.position[tensor.saved_by]
                received[first : min(saver, last) + 1, saver + 1 :] -= tensor.bytes
        return np.asarray(self._intervals.sums(self._stash) + received)

    @cached_property
    def _received_by_one(self) -> FloatArray:
        """Tensors that one layer uses and none saves, by cut: the stash has them in any case."""
        totals = np.zeros(self._intervals.cuts)
        for tensor in self._layers.record.boundaries:
            if tensor.saved_by is None and len(set(tensor.users)) == 1:
                first, last = self._layers.span(tensor.producer, tensor.users)
                totals[first : last + 1] += tensor.bytes
        return totals

    @cached_property
    def _held(self) -> FloatArray:
        """What is held besides while there are most stashes.

        What a forward then sends, or the gradients that a backward receives and sends, or more.
        """
        layers, sums = self._layers, self._intervals.sums
        back = layers.returned_bytes
        forward, gradient = (sums(f.min(axis=0)) > 0 for f in (layers.forward_s, layers.gradient_s))
        sent = np.where(forward, layers.sent_bytes[None, :], 0.0)
        both = np.where(gradient, back[:, None] + back[None, :], 0.0)
        running = self._intervals.parameters.static + self._workspace
        return np.asarray(running + np.maximum(sent, both))

    @cached_property
    def _workspace(self) -> FloatArray:
        """What running layers hold beyond whole stashes, at least."""
        graph, rows = self._layers.problem.graph, self._layers.rows
        inputs = [float(graph.saved_input_bytes[row.name]) for row in rows]
        before = np.concatenate([[0.0], np.cumsum(np.maximum(self._stash, inputs))])
        peaks = np.array([float(graph.peak_bytes[row.name]) for row in rows]) + before[:-1]
        table = np.zeros(self._intervals.is_stage.shape)
        for begin in range(len(rows)):
            most = np.maximum.accumulate(peaks[begin:])
            table[begin, begin + 1 :] = np.maximum(most - before[begin + 1 :], 0.0)
        return table


def _numbers(count: int) -> Iterator[int]:
    number = 1
    while number <= count:
        yield number
        number = number + 1 if number < EXACT else int(number * GROWTH) + 1
