"""Exact synchronisation in two parts, the second overlapped with the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from executor.sync.all_reduce import BucketedReduction
from executor.sync.gradients import buckets_of
from executor.sync.halves import Halves, PartSums
from executor.sync.protocol import Optimise, Setting
from executor.training.optimisation import StepOutcome
from planner.sync.strategies import DecoupledOptions


@dataclass
class _Pending:
    """A step that the optimizer has still to make on the parameters of some buckets."""

    step: int = 0
    scale: float = 1.0
    factor: Tensor | None = None
    buckets: set[int] = field(default_factory=set)


class Decoupled(BucketedReduction):
    """``decoupled``: reduce-scatter during the backward, all-gather during the next forward.

    DeAR (Zhang et al. 2023, "Decoupling the All-Reduce Primitive"). The optimizer steps on a
    bucket's parameters before the first layer that uses one of them, so it must treat each
    parameter by itself, as torch's AdamW and SGD do. The norm of the gradient, where it is needed,
    is taken of the reduced parts, before any is gathered.

    Args:
        setting: of this rank.
    """

    gated = True

    def __init__(self, setting: Setting) -> None:
        options, groups = setting.options, setting.process_groups
        assert isinstance(options, DecoupledOptions)
        self._optimisation = setting.optimisation
        buckets = buckets_of(setting.shared, options.bucket_mib)
        self._sums = PartSums(
            buckets, groups, "sync.strategy: 'decoupled'", "use --sync all_reduce"
        )
        self._halves = [Halves(bucket, groups[bucket.ranks], self._sums) for bucket in buckets]
        super().__init__(setting, self._halves, overlap=True)
        self._bucket_of = {name: k for k, row in enumerate(buckets) for name in row.parameters}
        self._step = 0
        self._pending = _Pending()

    def begin(self, step: int) -> None:
        """All gradients are zero, but for those that the optimizer has still to step by."""
        self._step = step
        self.order.begin()
        for number, row in enumerate(self.rows):
            if number not in self._pending.buckets:
                row.clear()

    def launch(self, number: int) -> None:
        """Start to sum the bucket of a number."""
        self._bring_up_to_date(number)  # This rank may have run no forward that uses it.
        super().launch(number)

    def finish(self) -> None:
        """Start what is left, and wait for nothing."""
        self.order.finish()

    def update(self, optimise: Optimise) -> StepOutcome:
        """Decide on the step, make it on what this rank alone holds, and start to gather."""
        self.spans.wait(self.rows)
        optimisation = self._optimisation
        rate, scale = optimisation.set_rate(self._step), optimisation.scale
        norm = optimisation.norm(self._pieces(1 / scale))
        decided = optimisation.judge(norm)
        if decided.skipped:
            optimisation.zero_gradients()
        else:
            optimisation.train(self._step, self._own(), scale, decided.factor)
            numbers = set(range(len(self._halves)))
            self._pending = _Pending(self._step, scale, decided.factor, numbers)
            # A forward uses first what the backward has completed last.
            for row in reversed(self._halves):
                row.gather()
        return optimisation.outcome(rate, norm, decided)

    def _own(self) -> list[str]:
        """Parameters that no other rank holds."""
        return [n for n in self._optimisation.weights.masters if n not in self._bucket_of]

    def _pieces(self, factor: float) -> Iterator[tuple[Tensor, float]]:
        for row in self._halves:
            yield row.mine, factor
        for name in self._own():
            gradient = self._optimisation.weights.parameters[name].grad
            if gradient is not None:
                yield gradient, factor

    def before_use(self, names: Iterable[str]) -> None:
        """A forward is about to use parameters."""
        if self._pending.buckets:
            for number in {self._bucket_of[name] for name in names if name in self._bucket_of}:
                self._bring_up_to_date(number)

    def _bring_up_to_date(self, number: int) -> None:
        """Make the step on a bucket's parameters, and begin their next gradients."""
        pending, row = self._pending, self._halves[number]
        if number not in pending.buckets:
            return
        pending.buckets.remove(number)
        row.wait()
        row.attach()
        self._optimisation.train(pending.step, row.bucket.parameters, pending.scale, pending.factor)
        row.clear()

    def settle(self) -> None:
        """Make all steps that are left."""
        for number in range(len(self._halves)):
            self._bring_up_to_date(number)

    def close(self) -> None:
        """Let the rings go."""
        self._sums.close()
