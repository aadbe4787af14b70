"""Seconds and bytes of every interval of a chain on any number of devices of each type, at once.

Dynamic programs over cuts ask for the same figures of all intervals; here they are matrices.
Rows are the cut before the first layer, columns the cut after the last; entries where the column
is not after the row are infinite. Long chains are looked at in cells of layers: see
:func:`coarse_cuts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.partition.chain import Chain, FloatArray, IntArray

MOST_KEPT = 256
"""Matrices kept at a time, one for each number of devices by type."""
BoolArray = NDArray[np.bool_]
MAX_CUTS = 400
"""Matrices of so many cuts take a megabyte; longer chains are coarsened."""
Counts = tuple[int, ...]
"""A number of devices of each type, in the order of ``chain.types``."""


class Intervals:
    """Figures of the intervals between cuts.

    Args:
        chain: the layers.
        cuts: positions at which stages may begin and end, from 0 to the chain's length; all of
            them if not given.
        relaxed: the cuts are cells instead: a stage that begins somewhere in one cell and ends
            somewhere in another counts only what lies between for sure, so that the least over
            intervals of cells is at most the least over all intervals.
    """

    def __init__(
        self, chain: Chain, cuts: Sequence[int] | None = None, *, relaxed: bool = False
    ) -> None:
        self.chain = chain
        self.cuts = np.arange(chain.length + 1) if cuts is None else np.array(cuts, dtype=int)
        self.relaxed = relaxed and len(self.cuts) < chain.length + 1
        self.count = len(self.cuts) - 1
        self.microbatches = chain.problem.job.microbatches
        types = chain.problem.cluster.device_types
        self.types = [types[name] for name in chain.types]
        rows, columns = np.arange(self.count)[:, None], np.arange(self.count + 1)[None, :]
        self.is_interval = columns > rows
        self._first = self.cuts[:-1].copy()
        if self.relaxed:
            self._first[1:] = self.cuts[2:]
        self._load_s: dict[Counts, FloatArray] = {}

    def sums(self, per_layer: FloatArray | IntArray) -> FloatArray:
        """The sum of a figure over each interval; 0 where there is none."""
        prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
        sums = prefix[self.cuts][None, :] - prefix[self._first][:, None]
        return np.where(self.is_interval, np.maximum(sums, 0.0), 0.0)

    def before(self, per_layer: FloatArray) -> FloatArray:
        """The sum over all layers before each cut."""
        prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
        return np.asarray(prefix[self.cuts])

    def behind(self, per_layer: FloatArray) -> FloatArray:
        """The sum over all layers after each cut but the last, without those of its own cell."""
        total = float(per_layer.sum())
        behind = total - np.append(self.before(per_layer), total)
        return np.asarray(behind[1:-1] if self.relaxed else behind[:-2])

    @cached_property
    def crossing_bytes(self) -> tuple[FloatArray, FloatArray]:
        """Activations there and gradients back at each cut, nothing at the ends.

        The least within a cell.
        """
        return self._at_cuts(self.chain.cut_bytes), self._at_cuts(self.chain.cut_gradient_bytes)

    def _at_cuts(self, bytes_: IntArray) -> FloatArray:
        if not self.relaxed:
            crossing = bytes_[self.cuts].astype(float)
        else:
            crossing = np.minimum.reduceat(bytes_.astype(float), self.cuts)
        crossing[0] = crossing[-1] = 0.0
        return np.asarray(crossing)

    @cached_property
    def forward_s(self) -> list[FloatArray]:
        """Forward seconds of a microbatch, by type."""
        return [self.sums(self.chain.forward_s(name)) for name in self.chain.types]

    @cached_property
    def backward_s(self) -> list[FloatArray]:
        """Backward seconds of a microbatch, by type."""
        return [self.sums(self.chain.backward_s(name)) for name in self.chain.types]

    @cached_property
    def static_bytes(self) -> FloatArray:
        """Weights, gradients and optimizer state, at least."""
        return self.sums(self.chain.static_bytes)

    @cached_property
    def stash_bytes(self) -> FloatArray:
        """Stash of a microbatch, at least."""
        return self.sums(self.chain.stash_bytes)

    @cached_property
    def least_stash_bytes(self) -> FloatArray:
        """Stash of a microbatch, at least, if layers are recomputed wherever the job allows it."""
        if not self.chain.problem.job.recompute:
            return self.stash_bytes
        return self.sums(self.chain.stashes.kept_bytes)

    @cached_property
    def gradient_bytes(self) -> FloatArray:
        """Gradients reduced among the replicas of a stage."""
        return self.sums(self.chain.gradient_bytes)

    @cached_property
    def optimizer_traffic_bytes(self) -> FloatArray:
        """What the optimizer step reads and writes."""
        return self.sums(self.chain.optimizer_traffic_bytes)

    def least_forward_s(self, counts: Counts) -> FloatArray:
        """A microbatch forward on the fastest replica."""
        return np.asarray(np.min([self.forward_s[k] for k in _held(counts)], axis=0))

    def path_s(self, counts: Counts) -> FloatArray:
        """A microbatch forward and back, each on the fastest replica."""
        backward = np.min([self.backward_s[k] for k in _held(counts)], axis=0)
        return np.asarray(self.least_forward_s(counts) + backward)

    def load_s(self, counts: Counts) -> FloatArray:
        """The most loaded replica's work under the best split of whole microbatches."""
        if counts not in self._load_s:
            if len(self._load_s) >= MOST_KEPT:
                self._load_s.clear()
            work = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
            load = best_split(work, counts, self.microbatches)
            self._load_s[counts] = np.where(self.is_interval, load, np.inf)
        return self._load_s[counts]

    def optimizer_s(self, counts: Counts) -> FloatArray:
        """The optimizer step, on the replica with the widest memory."""
        widest = max(self.types[k].memory_bandwidth_gb_per_s for k in _held(counts))
        return self.optimizer_traffic_bytes / (widest * 1e9)

    def fits(self, counts: Counts) -> BoolArray:
        """Whether the layers may run on these types and one microbatch fits each memory.

        Layers are recomputed if need be.
        """
        needed = self.static_bytes + self.least_stash_bytes
        fits = self.is_interval & (needed <= self._room_bytes(counts))
        for k in _held(counts):
            fits &= self._foreign[k] == 0
        return np.asarray(fits)

    @cached_property
    def _foreign(self) -> list[FloatArray]:
        """Layers that may not run on each type."""
        return [self.sums(self.chain.foreign_layers(name)) for name in self.chain.types]

    def most_in_flight(self, counts: Counts, *, recompute: bool = False) -> FloatArray:
        """How many microbatches fit into each replica's memory; negative if not even the state.

        Args:
            counts: devices by type.
            recompute: everything is recomputed that may be.
        """
        room = self._room_bytes(counts) - self.static_bytes
        stash = self.least_stash_bytes if recompute else self.stash_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            stashes = np.floor(room / stash)
        return np.asarray(np.where(room < 0, -1.0, np.where(stash > 0, stashes, np.inf)))

    def _room_bytes(self, counts: Counts) -> int:
        return min(self.types[k].capacity_bytes for k in _held(counts))


def _held(counts: Counts) -> list[int]:
    return [k for k, count in enumerate(counts) if count]


def best_split(work: Sequence[FloatArray], counts: Counts, microbatches: int) -> FloatArray:
    """Least maximum of ``n_i * work_i`` over whole numbers that sum to the microbatches.

    The maximum is a multiple of some type's work: for each type the least multiple within which
    all replicas together take every microbatch, found by bisection.
    """
    held = _held(counts)
    if len(held) == 1:
        return np.asarray(-(-microbatches // counts[held[0]]) * work[held[0]])
    best = np.full_like(work[0], np.inf)
    for k in held:
        low, high = np.ones(work[k].shape, dtype=int), np.full(work[k].shape, microbatches)
        for _ in range(microbatches.bit_length() + 1):
            middle = (low + high) // 2
            enough = _taken(work, counts, middle * work[k] * (1 + 1e-12)) >= microbatches
            high = np.where(enough, middle, high)
            low = np.where(enough, low, np.minimum(middle + 1, high))
        best = np.minimum(best, high * work[k])
    return best


def _taken(work: Sequence[FloatArray], counts: Counts, limit: FloatArray) -> FloatArray:
    """Microbatches the replicas finish within a limit."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = [counts[k] * np.floor(limit / work[k]) for k in _held(counts)]
    return np.asarray(sum(np.where(np.isnan(row), np.inf, row) for row in rows))


def interval_sums(per_layer: FloatArray | IntArray) -> FloatArray:
    """``[i, j]``: the sum of a figure over layers i to j, ``j`` exclusive; negative if j < i."""
    prefix = np.concatenate([[0.0], np.cumsum(per_layer, dtype=float)])
    return np.asarray(prefix[None, :] - prefix[:, None])


def coarse_cuts(chain: Chain, count: int = MAX_CUTS) -> list[int]:
    """At most about ``count`` cuts, evenly spread over the work; where cells meet, the narrowest.

    Every cut of a chain that is short enough.
    """
    if chain.length <= count:
        return list(range(chain.length + 1))
    seconds = chain.least_work_s
    even = np.arange(1, chain.length + 1) / chain.length
    spread = np.cumsum(seconds) / max(float(seconds.sum()), 1e-300)
    # Half by work and half by number, so that neither free nor heavy layers make huge cells.
    cell = np.minimum((spread + even) / 2 * count, count - 1e-9).astype(int)
    crossing = chain.cut_bytes + chain.cut_gradient_bytes
    cuts = [0, chain.length]
    for number in range(count - 1):
        inside = np.flatnonzero(cell == number) + 1
        if len(inside):
            cuts.append(int(inside[crossing[inside].argmin()]))
    return sorted(set(cuts))
