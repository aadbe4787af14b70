"""Launching buckets as they are complete, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from executor.lower import Reduce
from executor.sync.buckets import Bucket


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
        self._members = {
            reduce: [n for row in buckets if reduce in row.reduces for n in row.parameters]
            for row in buckets
            for reduce in row.reduces
        }
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
