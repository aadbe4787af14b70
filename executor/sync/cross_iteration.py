"""All-reduces that overlap the whole next iteration, which begins on an approximation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from executor.sync.all_reduce import BucketedReduction, whole_sums
from executor.sync.gradients import buckets_of
from executor.sync.protocol import Optimise, Setting
from executor.training.master_weights import MasterWeights
from executor.training.optimisation import StepOutcome
from planner.errors import PipeplanError
from planner.sync.strategies import CrossIterationOptions


class TrueWeights:
    """Copies of the weights while the parameters hold an approximation of later ones.

    Args:
        weights: of this rank; of low-precision parameters the float32 masters are copied.
    """

    def __init__(self, weights: MasterWeights) -> None:
        self._weights = weights
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the parameters hold."""
        for name, master in self._weights.masters.items():
            if name in self._copies:
                self._copies[name].copy_(master)
            else:
                self._copies[name] = master.detach().clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the parameters hold the copies."""
        for name, copy in self._copies.items():
            self._weights.masters[name].copy_(copy)
        self._weights.copy_back()

    @torch.no_grad()
    def repeat_change(self, names: Collection[str]) -> None:
        """Keep the weights, and let some parameters change as much as they have since before."""
        for name, master in self._weights.masters.items():
            now = master.detach().clone() if name in names else master
            if name in names:
                master.mul_(2).sub_(self._copies[name])
            self._copies[name].copy_(now)
        self._weights.copy_back()


@contextmanager
def state_kept(weights: MasterWeights, names: Collection[str]) -> Iterator[None]:
    """Forget what the optimizer notes of some parameters inside, such as momenta and counters.

    It is copied meanwhile.
    """
    optimizer = weights.optimizer
    parameters = [weights.masters[name] for name in names]
    kept = {p: _copied(optimizer.state[p]) for p in parameters if p in optimizer.state}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    yield
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
    for parameter, state in kept.items():
        optimizer.state[parameter] = state
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else deepcopy(v) for k, v in state.items()}


Gradients = Mapping[str, Tensor]


class CrossIteration(BucketedReduction):
    """``cross_iteration``: iteration t + 1 computes while the gradients of t are summed.

    Jin's thesis (HKU 2023). The true weights advance by the whole gradients, with the optimizer's
    true state: w(t + 1) = step(w(t), sum of the ranks' g(t)). The gradients g(t) are taken on
    an approximation a(t) of w(t), for w(t) is not known yet when iteration t begins; staleness is
    one iteration at most. a(1) = w(1), and then

    - ``own_gradient``: a(t + 1) = step(w(t), g(t) of this rank alone, over its share of the
      microbatches). The optimizer steps as it would, and what it notes of it (momenta, counters)
      is forgotten.
    - ``last_update``: a(t + 1) = w(t) + (w(t) - w(t - 1)); a(2) = w(1). Parameters that one rank
      alone holds, whose gradient nobody has to wait for, go by their own gradient.

    Without replicas and tied parameters it is so exact. An approximation is clipped by its own
    norm, a true step by that of the whole gradient. The loss of an iteration is that of a(t), its
    gradient norm that of the true step made in it, of the iteration before.

    Takes a second buffer of all shared gradients and a copy of the trained weights, and for a
    moment a copy of the optimizer's state of a bucket.

    Args:
        setting: of this rank.

    Raises:
        PipeplanError: for float16, where a step may turn out to be skipped.
    """

    def __init__(self, setting: Setting) -> None:
        options = setting.options
        assert isinstance(options, CrossIterationOptions)
        self._optimisation = setting.optimisation
        require_no_loss_scale(self._optimisation.may_skip)
        self._repeats = options.approximation == "last_update"
        self._own_share = setting.own_share
        buckets = buckets_of(setting.shared, options.fusion_mib, over_reductions=True)
        self._shared = {name for bucket in buckets for name in bucket.parameters}
        super().__init__(setting, whole_sums(setting, buckets), overlap=False)
        # The rows are of this iteration; these are summed meanwhile.
        self._others = whole_sums(setting, buckets)
        self._true = TrueWeights(self._optimisation.weights)
        self._summed: Gradients | None = None
        self._unused: Gradients = {}
        self._step = 0

    def begin(self, step: int) -> None:
        """All gradients are zero, in the buffers that are not under way."""
        super().begin(step)
        self._step = step

    def finish(self) -> None:
        """Sums begin after the update."""

    def update(self, optimise: Optimise) -> StepOutcome:
        """Advance the true weights by the last iteration, approximate those after this one."""
        own = self._gradients()
        done = self._advance(self._step - 1)
        rate = self._optimisation.set_rate(self._step)
        self._approximate(own)
        self._sum(own)
        return replace(done, learning_rate=rate)

    def _gradients(self) -> Gradients:
        """Take the gradients that this rank's backwards have left from the parameters."""
        parameters = self._optimisation.weights.parameters
        found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        self._optimisation.zero_gradients()
        return found

    def _advance(self, step: int) -> StepOutcome:
        if self._summed is None:
            self._true.keep()
            return StepOutcome(None, None, skipped=False)
        self.spans.wait(self._others)
        self._true.put_back()
        for name, gradient in self._summed.items():
            self._optimisation.weights.parameters[name].grad = gradient
        self._summed = None
        return self._optimisation.step(step)

    def _approximate(self, own: Gradients) -> None:
        weights = self._optimisation.weights
        if self._repeats:
            self._true.repeat_change(self._shared)
        else:
            self._true.keep()
        self._unused = {n: view for row in self._others for n, view in row.views.items()}
        estimates = {n: self._scale(n) for n in own if not (self._repeats and n in self._shared)}
        factor = self._clip_factor(own, estimates)
        for names in self._parts(estimates):
            if not names:
                continue
            for name in names:
                weights.parameters[name].grad = self._scaled(name, own[name], estimates[name])
            with state_kept(weights, names):
                self._optimisation.train(self._step, names, 1.0, factor)

    def _scale(self, name: str) -> float:
        """Return the factor from this rank's sum over microbatches to an estimate of all."""
        share = self._own_share[name] if name in self._shared else 1.0
        return 1 / share if share else 1.0

    def _scaled(self, name: str, own: Tensor, factor: float) -> Tensor:
        """A gradient times a factor, in the buffers whose sums have been used."""
        if name not in self._unused:
            return own * factor
        return torch.mul(own, factor, out=self._unused[name])

    def _clip_factor(self, own: Gradients, estimates: Mapping[str, float]) -> Tensor | None:
        optimisation = self._optimisation
        if not optimisation.needs_norm:
            return None
        counted = [name for name in estimates if optimisation.is_counted(name)]
        norm = optimisation.norm((own[name], estimates[name]) for name in counted)
        return optimisation.judge(norm).factor

    def _parts(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Bucket by bucket, then what this rank alone holds."""
        left = dict.fromkeys(names)
        for row in self.rows:
            yield [name for name in row.bucket.parameters if name in left]
        yield [name for name in left if name not in self._shared]

    def _sum(self, own: Gradients) -> None:
        """Start to sum the gradients, now that nobody needs this rank's own any more."""
        self.order.finish()
        self._summed = own
        self.rows, self._others = self._others, self.rows

    def settle(self) -> None:
        """Advance the true weights by the last iteration; the next begins on them."""
        if self._summed is not None:
            self._advance(self._step)


def require_no_loss_scale(may_skip: bool) -> None:
    """Refuse to approximate steps that may be skipped.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    if may_skip:
        raise PipeplanError(
            "sync.strategy: cross_iteration goes on before it is known whether the gradients of "
            'float16 have overflowed; plan with precision = "bfloat16" or "float32" and leave '
            "skip_non_finite out, or use --sync all_reduce"
        )
