"""Exact synchronisation: gradients are summed over all ranks that hold a parameter."""

from __future__ import annotations

from collections.abc import Iterable

from executor.lower import Reduce
from executor.optimisation import Outcome
from executor.sync.buckets import buckets_by_reduction
from executor.sync.protocol import Optimise
from executor.sync.setting import Setting
from executor.sync.sums import BucketSums
from planner.sync.strategies import AllReduceOptions


class AllReduce:
    """``all_reduce``: sums buckets of gradients behind the backward that still runs.

    Buckets hold the gradients that the backward completes first first (Li et al. 2020, "PyTorch
    Distributed", section 3.2). Without overlap all begins after the last backward.

    Args:
        setting: of this rank.
    """

    gated = False

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        assert isinstance(options, AllReduceOptions)
        self.announced = self._overlap = options.overlap
        buckets = buckets_by_reduction(setting.shared, options.bucket_mib)
        self._sums = BucketSums(buckets, setting.process_groups, setting.recorder)

    def begin(self, step: int) -> None:
        """All gradients are zero."""
        self._sums.begin()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._sums.ready(name)

    def before_use(self, names: Iterable[str]) -> None:
        """Parameters are never behind."""

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        if self._overlap:
            self._sums.over(reduce)

    def finish(self) -> None:
        """Wait until all gradients agree."""
        self._sums.finish()

    def update(self, optimise: Optimise) -> Outcome:
        """Let the optimizer step."""
        return optimise()

    def settle(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
