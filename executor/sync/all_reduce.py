"""Exact synchronisation: gradients are summed over all ranks that hold a parameter.

Buckets of gradients are summed over their ranks, overlapped with the rest of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from executor.runtime.runtime import Recorder
from executor.sync.gradients import Bucket, BucketSum, buckets_of
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

    def started(self, bucket: Bucket) -> None:
        """A bucket is under way."""
        for reduce in bucket.reduces:
            self._starts.setdefault(reduce, self._recorder.mark())

    def wait(self, rows: Iterable[BucketSum]) -> None:
        """Wait for all buckets that were started, in their order."""
        ends = {}
        for row in rows:
            row.wait()
            ends.update(dict.fromkeys(row.bucket.reduces, self._recorder.mark()))
        for reduce, start in self._starts.items():
            self._recorder.note("reductions", reduce, start, ends[reduce])
        self._starts.clear()


class BucketedReduction(Synchronisation):
    """Exact synchronisation: gradients are summed bucket by bucket over all ranks of each.

    Each rank holds the mean over all microbatches of its own part of the work, so the sum over
    the group is the gradient a single process would have. Each bucket is begun as soon as its
    gradients are there (Li et al. 2020, "PyTorch Distributed", section 3.2).

    Args:
        setting: of this rank.
        rows: the buckets of the gradients that this rank shares with others, in the order that all
            ranks have.
        overlap: whether buckets are reduced while the last backwards still run.
    """

    def __init__(self, setting: Setting, rows: Sequence[BucketSum], *, overlap: bool) -> None:
        self.announced = overlap
        self.rows = rows
        self.order = InOrder([row.bucket for row in rows], self.launch)
        self.spans = Spans(setting.recorder)

    def begin(self, step: int) -> None:
        """All gradients are zero."""
        for row in self.rows:
            row.clear()
        self.order.begin()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self.order.ready(name)

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        if self.announced:
            self.order.over(reduce)

    def launch(self, number: int) -> None:
        """Start to sum the bucket of a number."""
        self.spans.started(self.rows[number].bucket)
        self.rows[number].start()

    def finish(self) -> None:
        """Start what is left, and wait for the sums."""
        self.order.finish()
        self.spans.wait(self.rows)


def whole_sums(setting: Setting, buckets: Iterable[Bucket]) -> list[BucketSum]:
    """Return buckets with the process groups that sum them by all-reduces."""
    return [BucketSum(bucket, setting.process_groups[bucket.ranks]) for bucket in buckets]


def fused_all_reduce(setting: Setting) -> BucketedReduction:
    """Return ``fused``: as ``all_reduce``, in buffers over all stages that the same ranks share.

    Small gradients wait until enough of them are there, or none is left ("tensor fusion", Sergeev
    and Del Balso 2018, "Horovod", section 4). Which gradients go together is laid down beforehand,
    so that ranks need not agree on it.
    """
    options = setting.options
    assert isinstance(options, FusedOptions)
    buckets = buckets_of(setting.shared, options.fusion_mib, over_reductions=True)
    return BucketedReduction(setting, whole_sums(setting, buckets), overlap=True)
