"""Exact synchronisation of replicas that share the optimizer's state (ZeRO-1), or more (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from executor.sync.all_reduce import BucketedReduction, whole_sums
from executor.sync.divided_layers import DividedLayers
from executor.sync.gradients import Bucket, buckets_of
from executor.sync.halves import Halves, PartSums
from executor.sync.protocol import Optimise, Setting, Synchronisation
from executor.training.optimisation import StepOutcome
from executor.training.state_shards import Slice
from planner.sync.strategies import AllReduceOptions


def all_reduce(setting: Setting) -> Synchronisation:
    """Return ``all_reduce``: of whole gradients or, where ranks share the state, in two halves.

    Buckets hold the gradients that the backward completes first first. Without overlap all begins
    after the last backward.
    """
    options = setting.options
    assert isinstance(options, AllReduceOptions)
    buckets = buckets_of(setting.shared, options.bucket_mib)
    if setting.shards_state:
        return ShardedReduction(setting, buckets, overlap=options.overlap)
    return BucketedReduction(setting, whole_sums(setting, buckets), overlap=options.overlap)


class ShardedReduction(BucketedReduction):
    """``all_reduce`` in two halves, with the optimizer's step between them.

    Gradients are reduce-scattered bucket by bucket, as the last backwards complete them; each rank
    steps on the slices that it has the sums of; then parameters are gathered (Rajbhandari et al.
    2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1).
    Of layers whose weights ranks divide, each has the sums already, and nothing is gathered.

    Args:
        setting: of this rank.
        buckets: of the gradients that this rank shares with others.
        overlap: whether buckets are reduced while the last backwards still run.
    """

    def __init__(self, setting: Setting, buckets: Sequence[Bucket], *, overlap: bool) -> None:
        groups = setting.process_groups
        self._sums = PartSums(
            buckets, groups, "job.shard_optimizer: true", "plan with shard_optimizer = false"
        )
        self._halves = [Halves(row, groups[row.ranks], self._sums) for row in buckets]
        super().__init__(setting, self._halves, overlap=overlap)
        shards = setting.optimisation.shards
        # Nothing is trained in an emulation.
        self._slices: Mapping[str, Slice] = {} if shards is None else shards.slices
        self._trains = shards is not None
        self._divided = setting.divided or DividedLayers((), {})

    def begin(self, step: int) -> None:
        """All gradients are zero."""
        super().begin(step)
        self._divided.begin()

    def update(self, optimise: Optimise) -> StepOutcome:
        """Let the optimizer step on this rank's slices, then gather the parameters."""
        for row in self._halves:
            for own in self._own(row):
                own.parameter.grad = row.mine[own.part]
        self._divided.give_gradients()
        outcome = optimise()
        if not outcome.skipped:
            self._gather()
        return outcome

    def _gather(self) -> None:
        for row in self._halves:
            for own in self._own(row):
                row.my_weights[own.part].copy_(own.parameter.detach())
            row.gather(weights=True)
        for row in self._halves:
            row.wait()
            for name, view in row.weights.items() if self._trains else ():
                row.bucket.parameters[name].detach().copy_(view)

    def _own(self, row: Halves) -> Iterable[Slice]:
        """Return this rank's slices of a bucket."""
        return [self._slices[name] for name in row.bucket.parameters if name in self._slices]

    def settle(self) -> None:
        """Nothing is under way; what ranks have in parts is put together."""
        self._divided.settle()

    def close(self) -> None:
        """Let the rings go."""
        self._sums.close()
        self._divided.close()
