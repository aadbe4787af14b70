"""Exact synchronisation in two parts, the second overlapped with the next forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from executor.sync.all_reduce import InOrder, Spans
from executor.sync.gradients import buckets_by_reduction
from executor.sync.halves import HalvedBuckets
from executor.sync.protocol import Optimise, Setting, Synchronisation
from executor.training.optimisation import StepOutcome
from planner.plan.programs import Reduce
from planner.sync.strategies import DecoupledOptions


@dataclass
class _Pending:
    """A step that the optimizer has still to make on the parameters of some buckets."""

    step: int = 0
    scale: float = 1.0
    factor: Tensor | None = None
    buckets: set[int] = field(default_factory=set)


class Decoupled(Synchronisation):
    """``decoupled``: reduce-scatter during the backward, all-gather during the next forward.

    DeAR (Zhang et al. 2023, "Decoupling the All-Reduce Primitive"). The optimizer steps on a
    bucket's parameters before the first layer that uses one of them, so it must treat each
    parameter by itself, as torch's AdamW and SGD do. The norm of the gradient, where it is needed,
    is taken of the reduced parts, before any is gathered.

    Args:
        setting: of this rank.
    """

    announced, gated = True, True

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        assert isinstance(options, DecoupledOptions)
        self._optimisation = setting.optimisation
        buckets = buckets_by_reduction(setting.shared, options.bucket_mib)
        self._halves = HalvedBuckets(
            buckets,
            setting.process_groups,
            "sync.strategy: 'decoupled'",
            "use --sync all_reduce",
        )
        self._rows = self._halves.rows
        self._bucket_of = {name: k for k, row in enumerate(buckets) for name in row.parameters}
        self._order = InOrder(buckets, self._launch)
        self._spans = Spans(setting.recorder)
        self._step = 0
        self._pending = _Pending()

    def begin(self, step: int) -> None:
        """All gradients are zero, but for those that the optimizer has still to step by."""
        self._step = step
        self._order.begin()
        for number, row in enumerate(self._rows):
            if number not in self._pending.buckets:
                row.buffer.clear()
                row.buffer.attach()

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete on this rank."""
        self._order.ready(name)

    def start(self, reduce: Reduce) -> None:
        """All gradients of a reduction are complete on this rank."""
        self._order.over(reduce)

    def _launch(self, number: int) -> None:
        self._bring_up_to_date(number)  # This rank may have run no forward that uses it.
        self._spans.started(self._rows[number].bucket)
        self._rows[number].reduce()

    def finish(self) -> None:
        """Start what is left, and wait for nothing."""
        self._order.finish()

    def update(self, optimise: Optimise) -> StepOutcome:
        """Decide on the step, make it on what this rank alone holds, and start to gather."""
        for row in self._rows:
            row.reduced()
            self._spans.ended(row.bucket)
        self._spans.note()
        optimisation = self._optimisation
        rate, scale = optimisation.set_rate(self._step), optimisation.scale
        norm = optimisation.norm(self._pieces(1 / scale))
        decided = optimisation.judge(norm)
        if decided.skipped:
            optimisation.zero_gradients()
        else:
            optimisation.train(self._step, self._own(), scale, decided.factor)
            self._gather(_Pending(self._step, scale, decided.factor, set(range(len(self._rows)))))
        return optimisation.outcome(rate, norm, decided)

    def _own(self) -> list[str]:
        """Parameters that no other rank holds."""
        return [n for n in self._optimisation.weights.masters if n not in self._bucket_of]

    def _pieces(self, factor: float) -> Iterator[tuple[Tensor, float]]:
        for row in self._rows:
            yield row.mine, factor
        for name in self._own():
            gradient = self._optimisation.weights.parameters[name].grad
            if gradient is not None:
                yield gradient, factor

    def _gather(self, pending: _Pending) -> None:
        """Start with what a forward uses first, which the backward has completed last."""
        self._pending = pending
        for row in reversed(self._rows):
            row.gather()

    def before_use(self, names: Iterable[str]) -> None:
        """A forward is about to use parameters."""
        if self._pending.buckets:
            for number in {self._bucket_of[name] for name in names if name in self._bucket_of}:
                self._bring_up_to_date(number)

    def _bring_up_to_date(self, number: int) -> None:
        """Make the step on a bucket's parameters, and begin their next gradients."""
        pending, row = self._pending, self._rows[number]
        if number not in pending.buckets:
            return
        pending.buckets.remove(number)
        row.gathered()
        row.buffer.attach()
        names = row.bucket.parameters
        self._optimisation.train(pending.step, names, pending.scale, pending.factor)
        row.buffer.clear()
        row.buffer.attach()

    def settle(self) -> None:
        """Make all steps that are left."""
        for number in range(len(self._rows)):
            self._bring_up_to_date(number)

    def close(self) -> None:
        """Let the rings go."""
        self._halves.close()
