"""A pipeline's part in training beside others: shares, steps, groups, until the work is over."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from executor.coordinator.client import Client, Share, Welcome
from executor.coordinator.store import address_of
from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import CallError, RefusedError
from executor.exchange.weights import Weights
from executor.failure import talking_to
from executor.faults import Faults
from executor.metrics import StepMetrics
from executor.optimisation import Outcome
from executor.pipelines.seat import new_nonce
from executor.pipelines.snapshots import Snapshots
from executor.pipelines.trace import StepTimes
from executor.sync.groups import make_process_groups, shared_parameters
from executor.sync.protocol import Between
from executor.trainer import Trainer


class Member:
    """One rank of a pipeline.

    Args:
        trainer: of the pipeline alone.
        neighbours: at this rank's place.
        between: the strategy.
        client: of the coordinator.
        faults: that happen to it.

    Attributes:
        times: of its steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        neighbours: Neighbours,
        between: Between,
        client: Client,
        faults: Faults,
    ) -> None:
        self._trainer = trainer
        self._neighbours = neighbours
        self._between = between
        self._client = client
        self._snapshots = Snapshots(neighbours)
        self._faults = faults
        self.times = StepTimes(client.pipeline, client.place, client.store)
        neighbours.met = self.times.met
        neighbours.groups.under_way = faults.inside
        self._step = 0
        self._tied = _Tied(trainer)
        optimise = trainer.optimise
        trainer.optimise = partial(self._optimise, optimise)

    @property
    def there(self) -> Mapping[int, int]:
        """Lives of the pipelines that take part, by number."""
        return self._neighbours.there

    @property
    def leads(self) -> bool:
        """Whether its pipeline is the first of those that are there."""
        return self._client.pipeline == min(self._neighbours.there, default=0)

    @property
    def weights(self) -> Weights:
        """What it averages."""
        return self._neighbours.weights

    def run(self, after: Callable[[int, StepMetrics], None]) -> None:
        """Take part until the work is over; the weights are the mean of all then.

        Args:
            after: called with the number of a share and the metrics of its step.
        """
        self._step = self._begin()
        while True:
            share = self._take()
            if share.number is None:
                break
            self.times.begin(self._step)
            self._faults.at(self._step)
            self._between.begin(self._step)
            metrics = self._trainer.step(share.number + 1)
            after(share.number, metrics)
            self._step += 1
        self.times.end()
        self._between.settle()
        self._neighbours.mean_of_all()
        self._tied.agree()

    def close(self) -> None:
        """Answer no more calls: the others have no use for it once all work is over."""
        self._neighbours.server.close()

    def _begin(self) -> int:
        self._faults.before_hello(
            is_back=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        )
        while True:
            welcome = self._client.hello()
            client = self._client
            self._neighbours.life = welcome.life
            address = address_of(client.pipeline, client.place, welcome.life)
            client.store.set(address, self._neighbours.server.address)
            if self._has_weights(welcome):
                return welcome.step
            # The donor is lost: as a new pipeline it is given another one.
            client.begin_anew(new_nonce())

    def _has_weights(self, welcome: Welcome) -> bool:
        """Copy the donor's, if there is one; whether all places of the pipeline could."""
        if welcome.donor is None:
            return True
        fetched = torch.ones(1)
        try:
            self._snapshots.fetch(*welcome.donor, welcome.step)
        except (CallError, RefusedError):
            fetched.zero_()
        if dist.get_world_size() > 1:
            with talking_to("the other ranks of the pipeline"):
                dist.all_reduce(fetched, dist.ReduceOp.MIN)
        if fetched.item():
            self._between.reload()
        return bool(fetched.item())

    def _take(self) -> Share:
        """The next share; puts weights aside for who comes back."""
        while True:
            share = self._client.take(self._step, self._between.reduced)
            if share is None or share.snapshot:
                self._between.settle()
                self._snapshots.put_aside(self._step)
            if share is not None:
                self._neighbours.there = share.there
                return share

    def _optimise(self, optimise: Callable[[int], Outcome], step: int) -> Outcome:
        def local() -> Outcome:
            outcome = optimise(step)
            self.times.asks()
            return outcome

        outcome = self._between.update(self._step, local)
        self._tied.agree()
        return outcome


class _Tied:
    """Copies of a tied parameter in one pipeline, which average with different neighbours."""

    def __init__(self, trainer: Trainer) -> None:
        shared = [row for row in shared_parameters(trainer.plan) if len(row.stages) > 1]
        self._groups = make_process_groups(row.ranks for row in shared)
        rank = trainer.prepared.place.rank
        self._mine = [row for row in shared if rank in row.ranks]
        self._weights = trainer.optimisation.weights

    @torch.no_grad()
    def agree(self) -> None:
        """Give all copies their mean."""
        for row in self._mine:
            for name in row.names:
                master = self._weights.masters[name]
                with talking_to(f"ranks {row.ranks}, which share {name}"):
                    dist.all_reduce(master, group=self._groups[row.ranks])
                master.div_(len(row.ranks))
        if self._mine:
            self._weights.copy_back()
