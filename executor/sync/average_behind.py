"""Averaging weights over groups while the next iteration is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.exchange.neighbours import Neighbours
from executor.optimisation import Outcome
from executor.sync.protocol import Optimise


@dataclass(frozen=True)
class _Average:
    """What became of one.

    Attributes:
        succeeded: also where there was nobody to average with.
        changes: of the flat tensors of weights; None: there are none.
    """

    succeeded: bool
    changes: list[Tensor] | None = None


class AverageBehind:
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
        self._under_way: Future[_Average] | None = None
        self._last_reduced = True
        # Failures are told with the next request for a group, not with that for a share.
        self.reduced = True

    def begin(self, step: int) -> None:
        """Compute on what the last average made of the weights, if it has come."""
        if self._under_way is not None and self._under_way.done():
            self._take_changes()

    def update(self, step: int, optimise: Optimise) -> Outcome:
        """Step, and give a copy to the next group once the last one is through."""
        outcome = optimise()
        self._take_changes()
        copies = [flat.clone() for flat in self._neighbours.weights.flat]
        self._under_way = self._pool.submit(self._average, step, copies, self._last_reduced)
        return outcome

    def settle(self) -> None:
        """Wait for the average that is under way."""
        self._take_changes()

    def reload(self) -> None:
        """Nothing is under way when a pipeline begins."""

    @torch.no_grad()
    def _average(self, step: int, copies: list[Tensor], reduced: bool) -> _Average:
        """On the other thread."""
        group = self._neighbours.ask(step, reduced)
        if len(group.members) < 2:
            return _Average(True)
        means = [copy.clone() for copy in copies]
        if not self._neighbours.groups.mean(group, means):
            return _Average(False)
        changes = [mean.sub_(copy) for mean, copy in zip(means, copies, strict=True)]
        return _Average(True, changes)

    @torch.no_grad()
    def _take_changes(self) -> None:
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        average = under_way.result()
        self._last_reduced = average.succeeded
        if average.changes is not None:
            weights = self._neighbours.weights
            for flat, change in zip(weights.flat, average.changes, strict=True):
                flat.add_(change)
            weights.put_back()
