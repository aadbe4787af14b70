"""What is left of a stage's overlapped all-reduces once its last backward has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from planner.plan.plan import BUCKET_MIB
from planner.verification.proof.figures import Figures, FloatArray

BUCKET_BYTES = BUCKET_MIB * 2**20
"""A bound is about plans with buckets of the default size."""


class OverlappedReductions:
    """The buckets of all stages of a chain, filled from their last layer to the first.

    Stages with the same end have the same buckets, except that with more layers in front the last
    one, which is still open, has more in it, and others may follow.

    Args:
        figures: of the layers.
    """

    def __init__(self, figures: Figures) -> None:
        count, made = len(figures.layers) + 1, list(_gradients_made(figures))
        # Of each stage: how many buckets are closed, the open one's bytes and its first layer.
        self._closed, self._open_first = np.zeros((2, count, count), dtype=int)
        self._open_bytes = np.zeros((count, count))
        self._closed_bytes = np.zeros((count, len(made) + 1))
        self._closed_first = np.zeros((count, len(made) + 1), dtype=int)
        for end in range(count):
            closed, held, reduced, place = 0, 0.0, 0.0, end
            for first, last, bytes_, reduced_bytes in made:
                if last >= end:  # Another stage holds it too, or alone.
                    continue
                if held and held + bytes_ > BUCKET_BYTES:
                    self._closed_bytes[end, closed] = reduced
                    self._closed_first[end, closed] = place
                    closed, held, reduced = closed + 1, 0.0, 0.0
                held, reduced, place = held + bytes_, reduced + reduced_bytes, first
                # So it is for all stages that begin here or before, until more of theirs follows.
                begins = slice(place + 1), end
                self._closed[begins], self._open_bytes[begins] = closed, reduced
                self._open_first[begins] = place
        width = int(self._closed.max()) + 1
        self._closed_bytes = self._closed_bytes[:, :width]
        self._closed_first = self._closed_first[:, :width]
        sizes = np.concatenate([self._closed_bytes, self._open_bytes], axis=1)
        self._sizes, number = np.unique(sizes, return_inverse=True)
        self._number = number.reshape(sizes.shape)

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
        width = self._closed_bytes.shape[1]
        closed_s, open_s = np.split(all_reduce_s(self._sizes)[self._number], [width], axis=1)
        passed = np.insert(np.cumsum(seconds, axis=-1), 0, 0.0, axis=-1)
        until = np.cumsum(closed_s, axis=1) - closed_s
        # The most of any closed bucket, but for the sum up to the last one and the first layer.
        most = np.maximum.accumulate(-until - passed[..., self._closed_first], axis=-1)
        ends, last = np.arange(len(until)), np.maximum(self._closed - 1, 0)
        behind = most[..., ends, last] + until[ends, self._closed]
        behind = np.where(self._closed > 0, behind, -np.inf)
        left = open_s + passed[..., None] + np.maximum(behind, -passed[..., self._open_first])
        return np.asarray(np.clip(left, 0.0, at_once_s))


def _gradients_made(figures: Figures) -> Iterator[tuple[int, int, float, float]]:
    """Yield gradients in the order in which a backward of all layers makes them.

    Of each the first and the last layer that hold its parameter, the bytes with which it fills a
    bucket, and those that its reduction takes at least.
    """
    rows = {row.name: (held, row) for held, rows in figures.holders.items() for row in rows}
    order = dict.fromkeys(name for layer in figures.layers for name in layer.parameters)
    # What replicas divide is in no bucket.
    least = 2 if figures.space.shards_parameters else 1
    for held, row in (rows[name] for name in reversed(order)):
        if row.trainable and row.bytes and len(held) >= least:
            reduced = figures.costs.least_reduced_bytes(row)
            yield held[0], held[-1], figures.costs.gradient_bytes(row), reduced
