"""What is left of a stage's overlapped all-reduces once its last backward has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.plan.plan import BUCKET_MIB
from planner.verification.proof.layers import FloatArray, IntArray, ProvedIntervals

BUCKET_BYTES = BUCKET_MIB * 2**20
"""A bound is about plans with buckets of the default size."""


class _Filled(NamedTuple):
    """Buckets of the stages that end at each cut, filled from their last layer to the first.

    A stage with more layers in front has the same buckets, the last of them with more in it.

    Attributes:
        bytes: that the buckets which are closed reduce at least, a row for each end; 0 beyond the
            last one.
        first: the earliest layer of these.
        closed: how many of them a stage has, by begin and end.
        open_bytes: of its last bucket, which is not closed.
        open_first: the earliest layer of that.
    """

    bytes: FloatArray
    first: IntArray
    closed: IntArray
    open_bytes: FloatArray
    open_first: IntArray


class OverlappedReductions:
    """The buckets of all stages of a chain.

    Args:
        intervals: of its layers.
    """

    def __init__(self, intervals: ProvedIntervals) -> None:
        self._intervals = intervals

    @cached_property
    def _made(self) -> list[tuple[int, int, int, float]]:
        """First layer, last layer, bytes and reduced bytes of gradients, as they are made.

        Buckets are filled by the former and take as long as the latter at least.
        """
        layers = self._intervals.layers
        trained = {row.name: row for row in layers.graph.parameters if row.trainable}
        costs = layers.costs
        holders = {name: held for held, names in layers.holders.items() for name in names}
        order = dict.fromkeys(name for row in layers.rows for name in row.parameters)
        # What replicas divide is in no bucket.
        least = 2 if layers.space.shards_parameters else 1
        return [
            (
                holders[n][0],
                holders[n][-1],
                costs.gradient_bytes(row),
                costs.least_reduced_bytes(row),
            )
            for n, row in ((name, trained.get(name)) for name in reversed(order))
            if row is not None and row.bytes and len(holders[n]) >= least
        ]

    @cached_property
    def _filled(self) -> _Filled:
        count = self._intervals.count
        closed, open_first = np.zeros((2, count, count), dtype=np.int64)
        open_bytes = np.zeros((count, count))
        rows: list[list[tuple[float, int]]] = []
        for end in range(count):
            rows.append(self._fill(end, closed[:, end], open_bytes[:, end], open_first[:, end]))
        width = max(map(len, rows)) + 1
        padded = np.array([row + [(0.0, 0)] * (width - len(row)) for row in rows])
        first = padded[..., 1].astype(np.int64)
        return _Filled(padded[..., 0], first, closed, open_bytes, open_first)

    def _fill(
        self, end: int, closed: IntArray, open_bytes: FloatArray, open_first: IntArray
    ) -> list[tuple[float, int]]:
        """Return the closed buckets of stages with an end; note by begin what each one has."""
        buckets: list[tuple[float, int]] = []
        held, reduced, place = 0, 0.0, end
        for first, last, more, reduced_more in self._made:
            if last >= end:  # Another stage holds it too, or alone.
                continue
            if held and held + more > BUCKET_BYTES:
                buckets.append((reduced, place))
                held, reduced = 0, 0.0
            held, reduced, place = held + more, reduced + reduced_more, first
            # So it is for all stages that begin here or before, until more of theirs follows.
            closed[: first + 1], open_bytes[: first + 1] = len(buckets), reduced
            open_first[: first + 1] = first
        return buckets

    @cached_property
    def _sizes(self) -> tuple[FloatArray, IntArray]:
        """All sizes of buckets, and the number of each: of closed ones, then of open ones."""
        made = self._filled
        together = np.concatenate([made.bytes.ravel(), made.open_bytes.ravel()])
        sizes, number = np.unique(together, return_inverse=True)
        return sizes, number.reshape(-1)

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
        made, (sizes, number) = self._filled, self._sizes
        taken = all_reduce_s(sizes)[number]
        split = made.bytes.size
        each = taken[:split].reshape(made.bytes.shape)
        last = taken[split:].reshape(made.open_bytes.shape)
        passed = np.cumsum(np.insert(seconds, 0, 0.0, axis=-1), axis=-1)
        until = np.cumsum(each, axis=1) - each
        # The most of any closed bucket, but for the sum up to the last one and the first layer.
        most = np.maximum.accumulate(-until - passed[..., made.first], axis=-1)
        ends, place = np.arange(len(each)), np.maximum(made.closed - 1, 0)
        before, total = most[..., ends, place], until[ends, made.closed]
        behind = np.where(made.closed > 0, before + total, -np.inf)
        left = last + passed[..., None] + np.maximum(behind, -passed[..., made.open_first])
        return np.asarray(np.clip(left, 0.0, at_once_s))
