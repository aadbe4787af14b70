"""Summing buckets over their ranks behind the rest of the iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from executor.failure import talking_to
from executor.lower import Reduce
from executor.recorder import Recorder
from executor.sync.buckets import Bucket, Buffer
from executor.sync.in_order import InOrder
from executor.sync.spans import Spans


class BucketSums:
    """All-reduces of buckets, each begun as soon as its gradients are there.

    Each rank holds the mean over all microbatches of its own part of the work, so the sum over
    the group is the gradient a single process would have.

    Args:
        buckets: in the order that all ranks have.
        process_groups: by their ranks.
        recorder: told of all that runs.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        process_groups: Mapping[tuple[int, ...], Any],
        recorder: Recorder,
    ) -> None:
        self._rows = [(bucket, Buffer(bucket)) for bucket in buckets]
        self._process_groups = process_groups
        self._order = InOrder(buckets, self._launch)
        self._spans = Spans(recorder)
        self._under_way: list[tuple[Bucket, Any]] = []

    def begin(self) -> None:
        """All gradients are zero."""
        for _, buffer in self._rows:
            buffer.clear()
            buffer.attach()
        self._order.begin()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._order.ready(name)

    def over(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        self._order.over(reduce)

    def _launch(self, number: int) -> None:
        bucket, buffer = self._rows[number]
        group = self._process_groups[bucket.ranks]
        self._spans.started(bucket)
        with talking_to(bucket.partners):
            work = dist.all_reduce(buffer.flat, group=group, async_op=True)
        self._under_way.append((bucket, work))

    def finish(self) -> None:
        """Start what is left, and wait until all gradients agree."""
        self._order.finish()
        for bucket, work in self._under_way:
            with talking_to(bucket.partners):
                work.wait()
            self._spans.ended(bucket)
        self._under_way.clear()
        self._spans.note()
