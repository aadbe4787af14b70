"""How many microbatches memory lets a stage have in flight, and what it runs again for them.

A device with k microbatches in flight at some moment holds k stashes then. Layers that run again
keep less, and each of them costs a forward a microbatch. How much of that is needed at least is a
knapsack; with parts of layers allowed it has a closed form for every price of a byte.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.verification.costs import peak_bytes
from planner.verification.proof.figures import Figures, FloatArray

EXACT, GROWTH = 6, 1.3
"""Every number of microbatches in flight is a level up to the first, beyond it some are."""
MOST_PRICES = 64
"""Prices of a byte that are looked at; any of them gives a bound."""


class Level(NamedTuple):
    """What it takes to have many microbatches in flight.

    Attributes:
        in_flight: so many at most, and more than on the level before.
        again_s: (N + 1, N + 1) that a microbatch spends at least on layers that run again;
            infinite if that does not make room enough.
    """

    in_flight: int
    again_s: FloatArray


def memory_levels(figures: Figures) -> list[list[Level]]:
    """Return the levels of each type; none where any number of microbatches fits.

    Of those whose stashes are on the host any number may be in flight.
    """
    if figures.space.offload:
        return [[] for _ in figures.types]
    stash = np.array([float(row.stash_bytes) for row in figures.layers])
    received, unsaved = _tensors(figures)
    each = figures.sums(stash) + received
    besides = figures.parameters.static_bytes + _workspace(figures, stash) + _on_their_way(figures)
    numbers = [1]
    while numbers[-1] <= figures.microbatches:
        number = numbers[-1]
        numbers.append(number + 1 if number < EXACT else int(number * GROWTH) + 1)
    numbers[-1] = figures.microbatches + 1
    found: list[list[Level]] = []
    for kind, capacity in enumerate(figures.capacity_bytes):
        lacking = [
            np.where(figures.is_stage, np.maximum(each - (capacity - besides) / number, 0.0), 0.0)
            for number in numbers[:-1]
        ]
        rows = list(zip(lacking, pairwise(numbers), strict=True)) if lacking[-1].any() else []
        found.append(
            [Level(n - 1, _again_s(figures, kind, stash, lacks, unsaved)) for lacks, (_, n) in rows]
        )
    return found


def _again_s(
    figures: Figures, kind: int, stash: FloatArray, lacks: FloatArray, unsaved: FloatArray
) -> FloatArray:
    """Return the least seconds of forwards that save enough bytes of each stash, by interval.

    Args:
        figures: of the layers.
        kind: of the device.
        stash: bytes by layer.
        lacks: bytes by which each of some stashes of an interval is too large.
        unsaved: bytes by cut, see :func:`_tensors`.
    """
    if not figures.space.recompute:
        return np.where(lacks > 0, np.inf, 0.0)
    saving, cost = stash - figures.kept_bytes, figures.of_layer.again[kind]
    saved = np.maximum(lacks - unsaved[:, None], 0.0)
    least = np.where(saved > figures.sums(saving), np.inf, 0.0)
    prices = np.unique(cost[saving > 0] / saving[saving > 0])
    if len(prices) > MOST_PRICES:
        prices = np.quantile(prices, np.linspace(0, 1, MOST_PRICES))
    for price in prices:
        gain = figures.sums(np.maximum(price * saving - cost, 0.0))
        least = np.maximum(least, price * saved - gain)
    return least


def _tensors(figures: Figures) -> tuple[FloatArray, FloatArray]:
    """Return bytes of tensors between layers that an interval of layers holds.

    Received with each microbatch, unless their saver's stash has them already, by interval; and of
    these, by cut before the interval, what one layer uses and nobody saves: what that layer keeps
    if it runs again has them too.
    """
    received, unsaved = np.zeros(figures.is_stage.shape), np.zeros(len(figures.layers) + 1)
    for tensor in figures.graph.boundaries:
        first = figures.position[tensor.producer] + 1
        last = max(figures.position[user] for user in tensor.users)
        received[first : last + 1] += tensor.bytes
        if tensor.saved_by is not None:
            saver = figures.position[tensor.saved_by]
            received[first : min(saver, last) + 1, saver + 1 :] -= tensor.bytes
        elif len(set(tensor.users)) == 1:
            unsaved[first : last + 1] += tensor.bytes
    return received, unsaved


def _on_their_way(figures: Figures) -> FloatArray:
    """Return what a forward makes that is sent, or a backward's gradients that came and go.

    Both run while as many stashes as ever are held; operations of no length hold nothing that is
    seen.
    """
    forward = figures.sums(figures.of_layer.forward.min(axis=0)) > 0
    gradient = figures.sums(figures.of_layer.gradient.min(axis=0)) > 0
    back = figures.returned_bytes
    return np.maximum(forward * figures.sent_bytes, gradient * (back[:, None] + back))


def _workspace(figures: Figures, stash: FloatArray) -> FloatArray:
    """Return what layers hold while they run, beyond whole stashes; at least, by interval."""
    tensors, saved, peaks = figures.graph.boundaries, [], []
    parameters = {row.name: row for row in figures.graph.parameters}
    for row in figures.layers:
        used = [t for t in tensors if row.name in t.users]
        made = [t for t in tensors if t.producer == row.name]
        saved.append(sum(t.bytes for t in used if t.saved_by == row.name))
        peaks.append(peak_bytes(row, made, used, [parameters[n] for n in row.parameters]))
    before = np.insert(np.cumsum(np.maximum(stash, saved)), 0, 0.0)
    most_at_once = before[:-1] + peaks
    table = np.zeros(figures.is_stage.shape)
    for begin in range(len(peaks)):
        most = np.maximum.accumulate(most_at_once[begin:])
        table[begin, begin + 1 :] = np.maximum(most - before[begin + 1 :], 0.0)
    return table
