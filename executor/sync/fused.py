"""Exact synchronisation in large buffers over the stages of a rank."""

from __future__ import annotations

from collections.abc import Iterable

from executor.lower import Reduce
from executor.optimisation import Outcome
from executor.sync.buckets import buckets_by_ranks
from executor.sync.protocol import Optimise
from executor.sync.setting import Setting
from executor.sync.sums import BucketSums
from planner.sync.strategies import FusedOptions


class Fused:
    """``fused``: as ``all_reduce``, in buffers over all stages that the same ranks share.

    Small gradients wait until enough of them are there, or none is left ("tensor fusion", Sergeev
    and Del Balso 2018, "Horovod", section 4). Which gradients go together is laid down beforehand,
    so that ranks need not agree on it.

    Args:
        setting: of this rank.
    """

    announced, gated = True, False

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        assert isinstance(options, FusedOptions)
        buckets = buckets_by_ranks(setting.shared, options.fusion_mib)
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
