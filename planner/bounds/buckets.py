"""How long a stage's overlapped all-reduces take beyond its last backward, at least."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FloatArray, IntArray
from planner.costs.gradients import gradient_bytes, least_reduced_bytes
from planner.plan.plan import BUCKET_MIB
from planner.program.compiled import entry

BUCKET_BYTES = BUCKET_MIB * 2**20
"""A bound covers plans with buckets of the default size."""


class BucketTable(NamedTuple):
    """Buckets of all stages, filled from the last layer to the first.

    A stage that begins earlier has the same buckets, the last of them with more in it.

    Attributes:
        sizes: distinct bytes that buckets reduce, at least.
        closed_size: number of the size of each closed bucket, a row for each end.
        closed_first: the earliest layer of each.
        closed: how many of them a stage has, by begin and end.
        open_size: number of the size of its last bucket, by begin and end.
        open_first: the earliest layer of that.
    """

    sizes: FloatArray
    closed_size: IntArray
    closed_first: IntArray
    closed: IntArray
    open_size: IntArray
    open_first: IntArray


def bucket_table(intervals: IntervalTable) -> BucketTable:
    """Fill the buckets of all stages."""
    cuts, made = intervals.cuts, _gradients(intervals)
    closed, open_first, open_bytes = np.zeros((3, cuts, cuts), dtype=np.int64)
    rows: list[list[tuple[int, int]]] = []
    for end in range(cuts):
        full: list[tuple[int, int]] = []
        held, reduced, place = 0, 0, end
        for first, last, more, reduced_more in made:
            if last >= end:  # Another stage holds it too, or alone.
                continue
            if held and held + more > BUCKET_BYTES:
                full.append((reduced, place))
                held, reduced = 0, 0
            held, reduced, place = held + more, reduced + reduced_more, first
            # So it is for all stages that begin here or before, until more of theirs follows.
            closed[: first + 1, end], open_bytes[: first + 1, end] = len(full), reduced
            open_first[: first + 1, end] = first
        rows.append(full)
    width = max(map(len, rows)) + 1
    padded = np.array([row + [(0, 0)] * (width - len(row)) for row in rows])
    together = np.concatenate([padded[..., 0].ravel(), open_bytes.ravel()])
    sizes, number = np.unique(together, return_inverse=True)
    number = number.reshape(-1)
    split = padded[..., 0].size
    return BucketTable(
        sizes.astype(float),
        number[:split].reshape(padded.shape[:2]),
        np.ascontiguousarray(padded[..., 1]),
        closed,
        number[split:].reshape(open_bytes.shape),
        open_first,
    )


def _gradients(intervals: IntervalTable) -> list[tuple[int, int, int, int]]:
    """Return first layer, last layer, bytes and reduced bytes of gradients as they are made.

    Buckets are filled by the former, and take as long as the latter at least.
    """
    layers = intervals.layers
    job, trained = layers.problem.job, [row for row in layers.record.parameters if row.trainable]
    bytes_ = {
        row.name: (gradient_bytes(job, row), least_reduced_bytes(job, row)) for row in trained
    }
    holders = {name: held for held, names in layers.holders.items() for name in names}
    order = dict.fromkeys(name for row in layers.rows for name in row.parameters)
    # What replicas divide is in no bucket.
    least = 2 if layers.space.shards_parameters else 1
    return [
        (holders[name][0], holders[name][-1], *bytes_[name])
        for name in reversed(order)
        if any(bytes_.get(name, ())) and len(holders[name]) >= least
    ]


@entry
def reduced_after_s(
    table: BucketTable, reduce_s: FloatArray, passed_s: FloatArray, at_once_s: FloatArray
) -> FloatArray:
    """Return what is left of all-reduces after the last backward of each stage, at least.

    A bucket and all after it follow each other once the backward has come to the first layer of the
    bucket; the layers before that one may run meanwhile. The least over all ways to run them is

        max over buckets k of (sum of all-reduces from k on) - (seconds of the layers before k)

    Args:
        table: the buckets.
        reduce_s: all-reduce of each size.
        passed_s: (N + 1) running sums of the seconds of layers in that backward.
        at_once_s: (N + 1, N + 1) the all-reduces of everything, which it never exceeds.
    """
    cuts = len(passed_s)
    left = np.zeros((cuts, cuts))
    for end in range(1, cuts):
        for begin in range(end):
            total = reduce_s[table.open_size[begin, end]]
            most = total - (passed_s[table.open_first[begin, end]] - passed_s[begin])
            for k in range(table.closed[begin, end] - 1, -1, -1):
                total += reduce_s[table.closed_size[end, k]]
                ahead = passed_s[table.closed_first[end, k]] - passed_s[begin]
                most = max(most, total - ahead)
            left[begin, end] = min(max(most, 0.0), at_once_s[begin, end])
    return left
