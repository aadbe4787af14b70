"""Exact synchronisation of replicas that share the optimizer's state (ZeRO-1), or more (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from executor.sync.all_reduce import BucketedReduction, InOrder, Spans
from executor.sync.divided_layers import DividedLayers
from executor.sync.gradients import Bucket, buckets_by_reduction
from executor.sync.halves import HalvedBuckets, Halves
from executor.sync.protocol import Optimise, Setting, Synchronisation
from executor.training.optimisation import StepOutcome
from executor.training.state_shards import Slice
from planner.plan.programs import Reduce
from planner.sync.strategies import AllReduceOptions

_FIELD = "job.shard_optimizer: true"
_REMEDY = "plan with shard_optimizer = false"


def all_reduce(setting: Setting) -> Synchronisation:
    """Return ``all_reduce``: of whole gradients or, where ranks share the state, in two halves.

    Buckets hold the gradients that the backward completes first first. Without overlap all begins
    after the last backward.
    """
    options = setting.options
    assert isinstance(options, AllReduceOptions)
    buckets = buckets_by_reduction(setting.shared, options.bucket_mib)
    kind = ShardedReduction if setting.shards_state else BucketedReduction
    return kind(setting, buckets, overlap=options.overlap)


class ShardedReduction(Synchronisation):
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
        self.announced = self._overlap = overlap
        self._halves = HalvedBuckets(buckets, setting.process_groups, _FIELD, _REMEDY)
        self._order = InOrder(buckets, self._launch)
        self._spans = Spans(setting.recorder)
        shards = setting.optimisation.shards
        # Nothing is trained in an emulation.
        self._slices: Mapping[str, Slice] = {} if shards is None else shards.slices
        self._trains = shards is not None
        self._divided = setting.divided or DividedLayers((), {})

    def begin(self, step: int) -> None:
        """All gradients are zero."""
        for row in self._halves.rows:
            row.buffer.clear()
            row.buffer.attach()
        self._divided.begin()
        self._order.begin()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._order.ready(name)

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        if self._overlap:
            self._order.over(reduce)

    def _launch(self, number: int) -> None:
        row = self._halves.rows[number]
        self._spans.started(row.bucket)
        row.reduce()

    def finish(self) -> None:
        """Wait until this rank has the sums of its own parts."""
        self._order.finish()
        for row in self._halves.rows:
            row.reduced()
            self._spans.ended(row.bucket)
        self._spans.note()

    def update(self, optimise: Optimise) -> StepOutcome:
        """Let the optimizer step on this rank's slices, then gather the parameters."""
        for row in self._halves.rows:
            for own in self._own(row):
                own.parameter.grad = row.mine[own.part]
        self._divided.give_gradients()
        outcome = optimise()
        if not outcome.skipped:
            self._gather()
        return outcome

    def _gather(self) -> None:
        rows = self._halves.rows
        for row in rows:
            for own in self._own(row):
                row.my_weights[own.part].copy_(own.parameter.detach())
            row.gather(weights=True)
        for row in rows:
            row.gathered()
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
        self._halves.close()
        self._divided.close()
