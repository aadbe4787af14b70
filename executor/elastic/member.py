"""A pipeline's part in decentralized training: work units, steps and exchanges."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from executor.coordinator.client import Client, Welcome, WorkUnit
from executor.distributed.failure import talking_to
from executor.elastic.faults import Faults
from executor.elastic.neighbours import Neighbours
from executor.elastic.rank_assignment import new_incarnation
from executor.elastic.tensor_calls import CallError, Header, RefusedError
from executor.elastic.trace import PipelineStepTimes
from executor.sync.protocol import DecentralizedStrategy
from executor.sync.shared_parameters import make_process_groups, shared_parameters
from executor.training.master_weights import MasterWeights, require_finite
from executor.training.optimisation import Optimisation, StepOutcome
from planner.errors import PipeplanError
from planner.plan.plan import Plan

_ANSWER_S = 0.5
"""A request for a step that has not come yet is answered after this time."""


class Snapshots:
    """Serves copies of this rank's state to other pipelines' ranks at the same place.

    Args:
        neighbours: who may ask.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._changed = threading.Condition()
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        neighbours.server.handle("state", self._answer)

    def put_aside(self, step: int) -> None:
        """Keep a copy of the state before a step; one made for an earlier step is dropped."""
        state = self._neighbours.weights.state()
        with self._changed:
            self._kept = step, state
            self._changed.notify_all()

    def fetch(self, donor: int, incarnation: int, step: int) -> None:
        """Take over a donor's state before a step, as soon as it has come there.

        Raises:
            CallError: if the donor is gone.
            RefusedError: if it has put another state aside meanwhile.
            PipeplanError: if it has another model.
        """
        calls = self._neighbours.caller()
        while True:
            header, tensors = calls.call(donor, incarnation, "state", {"step": step})
            if "names" in header:
                break
            if calls.there().get(donor) != incarnation:
                raise CallError(f"pipeline {donor}, whose weights were to be copied, is lost")
        state = dict(zip(json.loads(header["names"]), tensors, strict=True))
        self._neighbours.weights.load(state)

    @torch.no_grad()
    def _answer(self, header: Header, _: list[Tensor]) -> tuple[Header, list[Tensor]]:
        step = int(header["step"])
        with self._changed:
            self._changed.wait_for(
                lambda: self._kept is not None and self._kept[0] >= step, _ANSWER_S
            )
            if self._kept is None or self._kept[0] < step:
                return {}, []
            if self._kept[0] > step:
                raise PipeplanError(f"no state from before step {step} is kept here")
            state = self._kept[1]
        return {"names": json.dumps(list(state))}, list(state.values())


class PipelineMember:
    """One rank of a pipeline in decentralized training.

    Args:
        plan: of the pipeline alone.
        optimisation: trains the rank's parameters.
        neighbours: the ranks at the same place of other pipelines.
        strategy: exchanges weights or gradients with them.
        client: of the coordinator.
        times: notes the pipeline's steps.
        faults: that happen to the pipeline.
    """

    def __init__(
        self,
        plan: Plan,
        optimisation: Optimisation,
        neighbours: Neighbours,
        strategy: DecentralizedStrategy,
        client: Client,
        times: PipelineStepTimes,
        faults: Faults,
    ) -> None:
        self._optimisation = optimisation
        self._neighbours = neighbours
        self._strategy = strategy
        self._client = client
        self._times = times
        self._faults = faults
        self._snapshots = Snapshots(neighbours)
        self._tied = _TiedParameters(plan, client.place, optimisation.weights)
        self._step = 0

    @property
    def there(self) -> Mapping[int, int]:
        """Incarnations of the pipelines that take part, by number."""
        return self._neighbours.there

    @property
    def leads(self) -> bool:
        """Whether its pipeline is the first of those that take part."""
        return self._client.pipeline == min(self._neighbours.there, default=0)

    def work_units(self, begun: Callable[[], object]) -> Iterator[int]:
        """Yield the numbers of the work units to train on, until all work is done.

        The weights are the mean over all pipelines then.

        Args:
            begun: called once the pipeline takes part.
        """
        self._step = self._begin()
        begun()
        while (unit := self._take()).number is not None:
            self._times.begin(self._step)
            self._faults.at(self._step)
            self._strategy.begin(self._step)
            yield unit.number
            self._step += 1
        self._times.end()
        self._strategy.settle()
        self._neighbours.mean_of_all()
        self._tied.agree()

    def optimise(self, step: int) -> StepOutcome:
        """Let the optimizer step, and exchange what the strategy exchanges.

        Args:
            step: number of the work unit, from 1.
        """

        def local() -> StepOutcome:
            outcome = self._optimisation.step(step)
            if outcome.own_norm is not None and not outcome.skipped:
                # Before the other pipelines are given weights that nothing is left of.
                require_finite(step, 0.0, [float(outcome.own_norm)])
            self._times.asks()
            return outcome

        outcome = self._strategy.update(self._step, local)
        self._tied.agree()
        return outcome

    def close(self) -> None:
        """Answer no more calls: the others have no use for it once all work is over."""
        self._neighbours.server.close()

    def _begin(self) -> int:
        self._faults.before_hello(
            is_back=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        )
        client = self._client
        while True:
            client.begin(new_incarnation())
            if dist.get_world_size() > 1:
                # The others are this incarnation before any of them is greeted as it.
                with talking_to("the other ranks of the pipeline"):
                    dist.barrier()
            welcome = client.hello(self._neighbours.server.address)
            if self._has_weights(welcome):
                return welcome.step
            # The donor is lost: as a new incarnation the pipeline is given another one.

    def _has_weights(self, welcome: Welcome) -> bool:
        """Copy the donor's weights, if there is one.

        Returns:
            Whether all ranks of the pipeline have weights now.
        """
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
            self._strategy.reload()
        return bool(fetched.item())

    def _take(self) -> WorkUnit:
        """Return the next work unit; put weights aside for pipelines that come back."""
        while True:
            unit = self._client.take(self._step, self._strategy.reduced)
            if unit is None or unit.snapshot:
                self._strategy.settle()
                self._snapshots.put_aside(self._step)
            if unit is not None:
                self._neighbours.there = unit.there
                return unit


class _TiedParameters:
    """Copies of a tied parameter in one pipeline, which average with different neighbours."""

    def __init__(self, plan: Plan, rank: int, weights: MasterWeights) -> None:
        shared = [row for row in shared_parameters(plan) if len(row.stages) > 1]
        self._groups = make_process_groups(row.ranks for row in shared)
        self._mine = [row for row in shared if rank in row.ranks]
        self._weights = weights

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
