"""What memory takes: how many microbatches may be in flight, and what they have to run again.

A device with k microbatches in flight at some moment holds k stashes then. Layers that run again
keep less, and each of them costs a forward a microbatch. How much of that is needed at least is a
knapsack; with parts of layers allowed it has a closed form for every price of a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.model.graph_record import Boundary
from planner.verification.proof.layers import FloatArray, ProvedIntervals, ProvedLayers
from planner.verification.stage_bytes import peak_bytes

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


def memory_levels(intervals: ProvedIntervals) -> list[list[ProvedMemoryLevel]]:
    """Return levels of microbatches in flight, by type; none where every number of them fits.

    Of those whose stashes are on the host any number may be in flight.
    """
    types = intervals.layers.types
    if intervals.layers.space.offload:
        return [[] for _ in types]
    memory = _Memory(intervals)
    return [list(memory.levels(kind)) for kind in range(len(types))]


class _Memory:
    """The bytes that stages of some layers hold, and what it costs to hold fewer."""

    def __init__(self, intervals: ProvedIntervals) -> None:
        self._intervals, self._layers = intervals, intervals.layers
        self._stash = np.array([float(row.stash_bytes) for row in self._layers.rows])
        self._saving = self._stash - intervals.kept_bytes
        self._stashes = intervals.sums(self._stash) + self._received()
        self._received_alone = self._bytes_received_alone()
        self._held = intervals.static_bytes + _workspace(self._layers, self._stash)
        self._held += np.maximum(*self._on_their_way())

    def levels(self, kind: int) -> Iterator[ProvedMemoryLevel]:
        """Yield the levels of a type."""
        count = self._layers.microbatches
        numbers = list(_numbers(count))
        if self._needed(kind, numbers[-1]).any():
            for number, following in pairwise([*numbers, count + 1]):
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

    def _received(self) -> FloatArray:
        """Received tensors by interval, unless their saver's stash has them already."""
        position, received = self._layers.position, np.zeros(self._intervals.is_stage.shape)
        for tensor in self._layers.graph.boundaries:
            first, last = self._span(tensor)
            received[first : last + 1] += tensor.bytes
            if tensor.saved_by is not None:
                saver = position[tensor.saved_by]
                received[first : min(saver, last) + 1, saver + 1 :] -= tensor.bytes
        return received

    def _bytes_received_alone(self) -> FloatArray:
        """Received tensors that one layer uses and nobody saves, by cut: kept in any case.

        What that layer keeps if it runs again has them too.
        """
        totals = np.zeros(self._intervals.count)
        for tensor in self._layers.graph.boundaries:
            if tensor.saved_by is None and len(set(tensor.users)) == 1:
                first, last = self._span(tensor)
                totals[first : last + 1] += tensor.bytes
        return totals

    def _span(self, tensor: Boundary) -> tuple[int, int]:
        """Return the first and the last cut that a tensor passes."""
        position = self._layers.position
        return position[tensor.producer] + 1, max(position[user] for user in tensor.users)

    def _on_their_way(self) -> tuple[FloatArray, FloatArray]:
        """What a forward makes that is sent, and a backward's gradients that came and go.

        Both run while as many stashes as ever are held; operations of no length hold nothing that
        is seen.
        """
        layers, sums = self._layers, self._intervals.sums
        forward = sums(layers.forward_s.min(axis=0)) > 0
        gradient = sums(layers.gradient_s.min(axis=0)) > 0
        back = layers.returned_bytes
        both = np.where(gradient, back[:, None] + back, 0.0)
        return np.where(forward, layers.sent_bytes, 0.0), both


def _workspace(layers: ProvedLayers, stash: FloatArray) -> FloatArray:
    """Return what layers hold while they run, beyond whole stashes; at least, by interval."""
    tensors, saved, peaks = layers.graph.boundaries, [], []
    parameters = {row.name: row for row in layers.graph.parameters}
    for row in layers.rows:
        used = [t for t in tensors if row.name in t.users]
        made = [t for t in tensors if t.producer == row.name]
        saved.append(sum(t.bytes for t in used if t.saved_by == row.name))
        peaks.append(peak_bytes(row, made, used, [parameters[n] for n in row.parameters]))
    before = np.concatenate([[0.0], np.cumsum(np.maximum(stash, saved))])
    most_at_once = before[:-1] + peaks
    table = np.zeros((len(before), len(before)))
    for begin in range(len(peaks)):
        most = np.maximum.accumulate(most_at_once[begin:])
        table[begin, begin + 1 :] = np.maximum(most - before[begin + 1 :], 0.0)
    return table


def _numbers(count: int) -> Iterator[int]:
    number = 1
    while number <= count:
        yield number
        number = number + 1 if number < EXACT else int(number * GROWTH) + 1
