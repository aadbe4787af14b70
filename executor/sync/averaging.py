"""Decentralized strategies that average weights: over groups, or with a partner at any time.

- Partial all-reduce: groups by a static schedule or drawn by a generator; the whole pipeline is in
  the same group at all its places. Ripples (Luo et al. 2019), published as Prague (ASPLOS 2020).
  How groups form: see :mod:`planner.sync.groups`.
- Semi-decentralised synchronisation: at each place of the pipelines by itself, the replicas that
  are ready average. SDPipe (Miao et al., VLDB 2023). How groups form: see
  :mod:`planner.sync.groups.readiness`.

  Both wait for the average, as in the papers, or overlap it with the next iteration.
- Asynchronous decentralised parallel SGD (Lian et al. 2018): averages of two, at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from executor.elastic.neighbours import Neighbours
from executor.elastic.tensor_calls import CallError, Header
from executor.sync.eager_parameter_server import EagerParameterServer
from executor.sync.parameter_server import ParameterServer
from executor.sync.parameter_shards import ServedOptimizer
from executor.sync.protocol import DecentralizedStrategy, Optimise
from executor.sync.waves import WaveSynchronous
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import StepOutcome
from planner.errors import PipeplanError
from planner.sync.groups.matching import bipartition, passive_partner
from planner.sync.strategies import (
    AdPsgdOptions,
    EagerParameterServerOptions,
    Options,
    ParameterServerOptions,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    WaveSynchronousOptions,
    overlaps_averages,
)


class GroupAverage(DecentralizedStrategy):
    """A local optimizer step, then the mean of the weights over a group.

    ``X(k+1) = (X(k) - rate * G(k)) W(k)`` with doubly stochastic ``W(k)`` (SDPipe, VLDB 2023,
    section 3). Momentum and Adam's moments stay each pipeline's own. A group in which somebody
    fails is left out by those it fails for: means of weights tolerate that, sums of gradients
    would not.

    Args:
        neighbours: at this rank's place.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Step, ask for a group, average."""
        outcome = optimise()
        weights = self._neighbours.weights
        group = self._neighbours.ask(step)
        self.reduced = self._neighbours.groups.mean(group, weights.flat)
        weights.put_back()
        return outcome


class OverlappedAverage(DecentralizedStrategy):
    """A local optimizer step, then the mean of the weights, which arrives an iteration later.

    After its step a rank gives a copy of its weights to a group and computes on with its own. What
    the average changed is added when it has come, at the latest after the next step: ``w += mean -
    copy``. The changes of all members sum to nothing, so an average keeps the mean of all weights
    as one that is waited for does. A rank takes part in one group at a time, and waits for nobody
    unless a group takes longer than its computation. Momentum and Adam's moments stay each
    pipeline's own. A group in which somebody fails is left out by those it fails for.

    Args:
        neighbours: at this rank's place.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._pool = ThreadPoolExecutor(1, "pipeplan-average")
        # Changes of the flat tensors of weights, none if nobody was there; None: it failed.
        self._under_way: Future[list[Tensor] | None] | None = None
        # Failures are told with the next request for a group, not with that for a share.
        self._last_reduced = True

    def begin(self, step: int) -> None:
        """Compute on what the last average made of the weights, if it has come."""
        if self._under_way is not None and self._under_way.done():
            self._take_changes()

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Step, and give a copy to the next group once the last one is through."""
        outcome = optimise()
        self._take_changes()
        copies = [flat.clone() for flat in self._neighbours.weights.flat]
        self._under_way = self._pool.submit(self._average, step, copies, self._last_reduced)
        return outcome

    def settle(self) -> None:
        """Wait for the average that is under way."""
        self._take_changes()

    @torch.no_grad()
    def _average(self, step: int, copies: list[Tensor], reduced: bool) -> list[Tensor] | None:
        """Average copies of the weights, on the other thread."""
        group = self._neighbours.ask(step, reduced)
        if len(group.members) < 2:
            return []
        means = [copy.clone() for copy in copies]
        if not self._neighbours.groups.mean(group, means):
            return None
        return [mean.sub_(copy) for mean, copy in zip(means, copies, strict=True)]

    @torch.no_grad()
    def _take_changes(self) -> None:
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        changes = under_way.result()
        self._last_reduced = changes is not None
        if changes:
            weights = self._neighbours.weights
            for flat, change in zip(weights.flat, changes, strict=True):
                flat.add_(change)
            weights.put_back()


class AdPsgd(DecentralizedStrategy):
    """While a pipeline computes, its weights are averaged with a partner's.

    Gradients are those of the weights at the iteration's begin; their update is added to what the
    weights have become meanwhile. Half of the pipelines ask, the other half answers at any time,
    so that nobody waits for somebody who waits. Each average keeps the mean of all weights: what
    one side gains the other loses. Momentum and Adam's moments stay each pipeline's own.

    Args:
        neighbours: at this rank's place.
        seed: of whom is asked.
    """

    def __init__(self, neighbours: Neighbours, seed: int = 0) -> None:
        self._neighbours = neighbours
        self._seed = seed
        self._lock = threading.Lock()
        self._shared = [flat.clone() for flat in neighbours.weights.flat]
        self._pool = ThreadPoolExecutor(1, "pipeplan-average")
        self._calls = neighbours.caller()
        self._asking: Future[None] | None = None
        neighbours.server.handle("average", self._answer, sum(flat.nbytes for flat in self._shared))

    def begin(self, step: int) -> None:
        """Compute on the weights as they are now, and ask a partner meanwhile."""
        self.reduced = True
        self._take_shared()
        there = sorted(self._neighbours.there.items())
        place = [number for number, _ in there].index(self._neighbours.pipeline)
        asking, _ = bipartition(len(there))
        if place in asking:
            partner = passive_partner(place, step, len(there), self._seed)
            if partner is not None:
                self._asking = self._pool.submit(self._ask, *there[partner])

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Add this iteration's update to the weights that partners see."""
        flat = self._neighbours.weights.flat
        before = [tensor.clone() for tensor in flat]
        outcome = optimise()
        with self._lock:
            for shared, tensor, old in zip(self._shared, flat, before, strict=True):
                shared.add_(tensor - old)
        self._await_answer()
        return outcome

    def settle(self) -> None:
        """Take the weights as partners see them."""
        self._await_answer()
        self._take_shared()

    def reload(self) -> None:
        """Partners see the donor's weights."""
        with self._lock:
            for shared, tensor in zip(self._shared, self._neighbours.weights.flat, strict=True):
                shared.copy_(tensor)

    def _take_shared(self) -> None:
        with self._lock:
            for shared, tensor in zip(self._shared, self._neighbours.weights.flat, strict=True):
                tensor.copy_(shared)
        self._neighbours.weights.put_back()

    def _await_answer(self) -> None:
        if self._asking is not None:
            asking, self._asking = self._asking, None
            asking.result()

    @torch.no_grad()
    def _ask(self, partner: int, incarnation: int) -> None:
        with self._lock:
            sent = [shared.clone() for shared in self._shared]
        try:
            _, means = self._calls.call(partner, incarnation, "average", {}, sent)
        except CallError:
            # It is gone, and the coordinator will say so.
            self.reduced = False
            return
        self._neighbours.met(tuple(sorted((self._neighbours.pipeline, partner))))
        with self._lock:
            for shared, mean, old in zip(self._shared, means, sent, strict=True):
                shared.add_((mean - old.cpu()).to(shared.device))

    @torch.no_grad()
    def _answer(self, header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
        if [t.shape for t in tensors] != [t.shape for t in self._shared]:
            raise PipeplanError("weights of another shape; start all pipelines with one plan")
        with self._lock:
            for shared, other in zip(self._shared, tensors, strict=True):
                shared.add_(other.to(shared.device)).div_(2)
            return {}, [shared.cpu().clone() for shared in self._shared]


def decentralized_strategy_of(
    options: Options, neighbours: Neighbours, seed: int, make_optimizer: MakeOptimizer
) -> DecentralizedStrategy:
    """Return the strategy for some options.

    Args:
        options: of a decentralized strategy.
        neighbours: the ranks at the same place of other pipelines.
        seed: of what it draws.
        make_optimizer: makes the optimizer of the parameters that a server keeps.
    """
    match options:
        case ParameterServerOptions(mode=mode, servers=servers):
            return ParameterServer(neighbours, make_optimizer, mode, servers or 1)
        case EagerParameterServerOptions():
            return EagerParameterServer(neighbours, make_optimizer, options)
        case WaveSynchronousOptions(distance=distance, servers=servers):
            return WaveSynchronous(neighbours, distance, servers or 1)
        case AdPsgdOptions(pairs="bipartite"):
            return AdPsgd(neighbours, seed)
        case AdPsgdOptions():
            return GroupAverage(neighbours)
        case PartialAllReduceOptions() | SemiDecentralizedOptions():
            is_overlapped = overlaps_averages(options)
            return OverlappedAverage(neighbours) if is_overlapped else GroupAverage(neighbours)
    raise AssertionError(f"{options!r} is no decentralized strategy")


def local_optimizer(options: Options, make_optimizer: MakeOptimizer) -> MakeOptimizer:
    """Return what makes a pipeline's own optimizer: where servers step, it only stands for theirs.

    Args:
        options: of a decentralized strategy.
        make_optimizer: makes an optimizer that steps.
    """
    if isinstance(options, ParameterServerOptions | EagerParameterServerOptions):
        return cast("MakeOptimizer", partial(_served, make_optimizer))
    return make_optimizer


def _served(
    make_optimizer: MakeOptimizer, parameters: Mapping[str, nn.Parameter]
) -> ServedOptimizer:
    return ServedOptimizer(make_optimizer(parameters), parameters)
