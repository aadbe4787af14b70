"""Exact synchronisation: gradients are summed over all ranks that hold a parameter.

Buckets of gradients are summed over their ranks, overlapped with the rest of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from executor.distributed.failure import talking_to
from executor.runtime.runtime import Recorder
from executor.sync.gradients import Bucket, Buffer, buckets_by_ranks
from executor.sync.protocol import Setting, Synchronisation
from planner.plan.programs import Reduce
from planner.sync.strategies import FusedOptions


class InOrder:
    """Launches each bucket once its gradients are all there and those before it are launched.

    With one order on all ranks no rank waits in a circle, whatever the backend: NCCL runs what it
    is given in that order.

    Args:
        buckets: in the order that all ranks have.
        launch: starts to reduce the bucket of a number.
    """

    def __init__(self, buckets: Sequence[Bucket], launch: Callable[[int], None]) -> None:
        self._buckets = buckets
        self._launch = launch
        self._bucket_of = {name: k for k, row in enumerate(buckets) for name in row.parameters}
        self._members: dict[Reduce, list[str]] = {}
        for reduce, names in (item for row in buckets for item in row.reduces.items()):
            self._members.setdefault(reduce, []).extend(names)
        self._missing: list[set[str]] = []
        self._next = 0

    def begin(self) -> None:
        """No gradient is there."""
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._next = 0

    def ready(self, name: str) -> None:
        """The gradient of a parameter is complete; parameters of no bucket do not matter."""
        self._ready([name])

    def over(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete."""
        self._ready(self._members[reduce])

    def finish(self) -> None:
        """All gradients are complete."""
        self._ready(self._bucket_of)

    def _ready(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._bucket_of:
                self._missing[self._bucket_of[name]].discard(name)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
            self._launch(self._next - 1)


class Spans:
    """Notes each reduction once: from its first bucket's start until the last was waited for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._starts: dict[Reduce, Any] = {}
        self._ends: dict[Reduce, Any] = {}

    def started(self, bucket: Bucket) -> None:
        """A bucket is under way."""
        for reduce in bucket.reduces:
            self._starts.setdefault(reduce, self._recorder.mark())

    def ended(self, bucket: Bucket) -> None:
        """A bucket was waited for."""
        for reduce in bucket.reduces:
            self._ends[reduce] = self._recorder.mark()

    def note(self) -> None:
        """All that were started have ended."""
        for reduce, start in self._starts.items():
            self._recorder.note("reductions", reduce, start, self._ends[reduce])
        self._starts.clear()
        self._ends.clear()


class BucketedReduction(Synchronisation):
    """Exact synchronisation: gradients are summed bucket by bucket over all ranks of each.

    Each rank holds the mean over all microbatches of its own part of the work, so the sum over
    the group is the gradient a single process would have. Each bucket is begun as soon as its
    gradients are there (Li et al. 2020, "PyTorch Distributed", section 3.2).

    Args:
        setting: of this rank.
        buckets: of the gradients that this rank shares with others, in the order that all ranks
            have.
        overlap: whether buckets are reduced while the last backwards still run.
    """

    def __init__(self, setting: Setting, buckets: Sequence[Bucket], *, overlap: bool) -> None:
        self.announced = self._overlap = overlap
        self._rows = [(bucket, Buffer(bucket)) for bucket in buckets]
        self._process_groups = setting.process_groups
        self._order = InOrder(buckets, self._launch)
        self._spans = Spans(setting.recorder)
        self._under_way: list[tuple[Bucket, Any]] = []

    def begin(self, step: int) -> None:
        """All gradients are zero."""
        for _, buffer in self._rows:
            buffer.clear()
            buffer.attach()
        self._order.begin()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._order.ready(name)

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        if self._overlap:
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


def fused_all_reduce(setting: Setting) -> BucketedReduction:
    """Return ``fused``: as ``all_reduce``, in buffers over all stages that the same ranks share.

    Small gradients wait until enough of them are there, or none is left ("tensor fusion", Sergeev
    and Del Balso 2018, "Horovod", section 4). Which gradients go together is laid down beforehand,
    so that ranks need not agree on it.
    """
    options = setting.options
    assert isinstance(options, FusedOptions)
    buckets = buckets_by_ranks(setting.shared, options.fusion_mib)
    return BucketedReduction(setting, buckets, overlap=True)
