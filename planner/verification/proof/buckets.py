"""What is left of a stage's overlapped all-reduces once its last backward has ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.plan.plan import BUCKET_MIB
from planner.verification.proof.layers import FloatArray, ProvedIntervals, ProvedLayers

BUCKET_BYTES = BUCKET_MIB * 2**20
"""A bound is about plans with buckets of the default size."""
Bucket = tuple[float, int]
"""Bytes that a bucket reduces at least, and the earliest layer of it."""


class OverlappedReductions:
    """The buckets of all stages of a chain, filled from their last layer to the first.

    Stages with the same end have the same buckets, except that with more layers in front the last
    one has more in it, and others may follow.

    Args:
        intervals: of its layers.
    """

    def __init__(self, intervals: ProvedIntervals) -> None:
        count, made = intervals.count, _gradients_made(intervals.layers)
        # Of each stage's buckets: how many are closed, and the one that is not.
        self._closed, self._open_first = np.zeros((2, count, count), dtype=np.int64)
        self._open_bytes = np.zeros((count, count))
        rows = [self._fill(end, made) for end in range(count)]
        width = max(map(len, rows)) + 1
        padded = np.array([row + [(0.0, 0)] * (width - len(row)) for row in rows])
        self._closed_bytes, self._closed_first = padded[..., 0], padded[..., 1].astype(np.int64)
        together = np.concatenate([self._closed_bytes.ravel(), self._open_bytes.ravel()])
        self._sizes, self._number = np.unique(together, return_inverse=True)

    def _fill(self, end: int, made: list[tuple[int, int, int, float]]) -> list[Bucket]:
        """Return the closed buckets of stages with an end; note by begin what each one has."""
        buckets: list[Bucket] = []
        held, reduced, place = 0, 0.0, end
        for first, last, more, reduced_more in made:
            if last >= end:  # Another stage holds it too, or alone.
                continue
            if held and held + more > BUCKET_BYTES:
                buckets.append((reduced, place))
                held, reduced = 0, 0.0
            held, reduced, place = held + more, reduced + reduced_more, first
            # So it is for all stages that begin here or before, until more of theirs follows.
            begins = slice(first + 1), end
            self._closed[begins], self._open_bytes[begins] = len(buckets), reduced
            self._open_first[begins] = first
        return buckets

    def left_s(
        self,
        all_reduce_s: Callable[[FloatArray], FloatArray],
        seconds: FloatArray,
        at_once_s: FloatArray,
    ) -> FloatArray:
        """Return how long after its last backward a replica of each stage reduces, at least.

        A bucket and all after it follow each other, once the backward has come to the first layer
        of the bucket; what is before that layer may run meanwhile.

        Args:
            all_reduce_s: of numbers of bytes, over the replicas.
            seconds: of each layer in that backward, the last axis; others may be before it.
            at_once_s: of all a stage's gradients, where nothing overlaps, by begin and end.
        """
        taken = all_reduce_s(self._sizes)[self._number.reshape(-1)]
        each, last = np.split(taken, [self._closed_bytes.size])
        each = each.reshape(self._closed_bytes.shape)
        last = last.reshape(self._open_bytes.shape)
        passed = np.cumsum(np.insert(seconds, 0, 0.0, axis=-1), axis=-1)
        until = np.cumsum(each, axis=1) - each
        # The most of any closed bucket, but for the sum up to the last one and the first layer.
        most = np.maximum.accumulate(-until - passed[..., self._closed_first], axis=-1)
        ends, place = np.arange(len(each)), np.maximum(self._closed - 1, 0)
        behind = most[..., ends, place] + until[ends, self._closed]
        behind = np.where(self._closed > 0, behind, -np.inf)
        left = last + passed[..., None] + np.maximum(behind, -passed[..., self._open_first])
        return np.asarray(np.clip(left, 0.0, at_once_s))


def _gradients_made(layers: ProvedLayers) -> list[tuple[int, int, int, float]]:
    """Return first layer, last layer, bytes and reduced bytes of gradients, as they are made.

    Buckets are filled by the former and take as long as the latter at least.
    """
    trained = {row.name: row for row in layers.graph.parameters if row.trainable}
    holders = {name: held for held, names in layers.holders.items() for name in names}
    order = dict.fromkeys(name for row in layers.rows for name in row.parameters)
    # What replicas divide is in no bucket.
    least = 2 if layers.space.shards_parameters else 1
    rows = [(holders[name], trained[name]) for name in reversed(order) if name in trained]
    costs = layers.costs
    return [
        (held[0], held[-1], costs.gradient_bytes(row), costs.least_reduced_bytes(row))
        for held, row in rows
        if row.bytes and len(held) >= least
    ]
