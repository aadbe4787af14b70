"""Asynchronous decentralised parallel SGD (Lian et al. 2018): averages of two, at any time."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import CallError, Header
from executor.optimisation import Outcome
from executor.sync.protocol import Optimise
from planner.errors import PipeplanError
from planner.sync.groups.matching import halves, passive_partner


class AdPsgd:
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
        self.reduced = True
        self._lock = threading.Lock()
        self._shared = [flat.clone() for flat in neighbours.weights.flat]
        self._pool = ThreadPoolExecutor(1, "pipeplan-average")
        self._calls = neighbours.caller()
        self._asking: Future[None] | None = None
        neighbours.server.handle("average", self._answer)

    def begin(self, step: int) -> None:
        """Compute on the weights as they are now, and ask a partner meanwhile."""
        self.reduced = True
        self._take_shared()
        there = sorted(self._neighbours.there.items())
        place = [number for number, _ in there].index(self._neighbours.pipeline)
        asking, _ = halves(len(there))
        if place in asking:
            partner = passive_partner(place, step, len(there), self._seed)
            if partner is not None:
                self._asking = self._pool.submit(self._ask, *there[partner])

    def update(self, step: int, optimise: Optimise) -> Outcome:
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
    def _ask(self, partner: int, life: int) -> None:
        with self._lock:
            sent = [shared.clone() for shared in self._shared]
        try:
            _, means = self._calls.call(partner, life, "average", {}, sent)
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
