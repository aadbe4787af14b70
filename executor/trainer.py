"""Training by a plan, one rank of it: iterations, their synchronisation, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from executor.arrivals import WatchedTransport
from executor.clock import clock_of
from executor.failure import talking_to
from executor.heap import keep_freed_memory
from executor.holders import Holders
from executor.layer_moments import LayerMoments
from executor.learning_rate import Factor
from executor.loss_scale import LossScale
from executor.lower import Reduce
from executor.master_weights import MakeOptimizer
from executor.metrics import Gathering, StepMetrics
from executor.optimisation import Optimisation, Outcome
from executor.optimizer import job_optimizer
from executor.pace import Pace, PacedWorker, Pacer
from executor.prepare import Prepared
from executor.recorder import Recorder, StepRecord
from executor.runtime import PipelineRuntime
from executor.stage.runner import StageRunner
from executor.sync import Setting, Synchronisation, make_strategy
from executor.sync.buckets import SharedGradients
from executor.sync.groups import make_process_groups, own_shares, shared_parameters
from executor.sync.readiness import AnnouncingWorker, Readiness, last_backwards
from executor.training_worker import BatchOf, TrainingWorker
from executor.transport import transport_of
from executor.worker import Worker
from planner.costs.placement import place_plan
from planner.sync.strategies import options_of


class Trainer:
    """This rank's part of training by a plan, in a process group that exists.

    Args:
        prepared: what this rank runs.
        batch_of: the batch of a step and microbatch; asked for what this rank's stages read only.
        seed: of what training draws.
        optimizer_of: makes the optimizer of parameters by name; default the job's.
        clip_norm: the whole model's gradient is clipped to it.
        factor: of the learning rate, by step.
        loss_scale: dynamic scaling for float16.
        autocast: what torch's autocast lowers operations to; as the model was prepared with.
        timeout: of collectives.
        watch: whether arrivals of messages are noted, for a timeline.
        synchronisation: made already; default the plan's strategy.
        pace: operations take the time that the plan's costs and it say; None: their own.

    Attributes:
        parameters: those this rank holds, by the model's own names (FQNs).
        optimise: the optimizer's part of a step.
        record: what this rank did in the last iteration.
    """

    def __init__(
        self,
        prepared: Prepared,
        batch_of: BatchOf,
        *,
        seed: int = 0,
        optimizer_of: MakeOptimizer | None = None,
        clip_norm: float | None = None,
        factor: Factor | None = None,
        loss_scale: LossScale | None = None,
        autocast: torch.dtype | None = None,
        timeout: timedelta | None = None,
        watch: bool = False,
        synchronisation: Synchronisation | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.prepared = prepared
        self.plan = prepared.plan
        self.device = prepared.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.parameters = prepared.parameters
        self.holders = Holders.of_plan(self.plan)
        self.record = StepRecord()
        self._recorder = Recorder(clock_of(self.device))
        self.optimisation = Optimisation(
            self.parameters,
            self.holders.first_held(prepared.place.rank),
            optimizer_of or partial(job_optimizer, self.plan.job),
            clip_norm=clip_norm,
            factor=factor,
            loss_scale=loss_scale,
        )
        self.optimise: Callable[[int], Outcome] = self.optimisation.step
        self._order = self.plan.parsed_orders()[self.plan.ranks[prepared.place.rank]]
        shared = self._connect(timeout)
        self.synchronisation = synchronisation or self._strategy(shared)
        self._pace = pace
        self._iterations = count(1)
        self._pacer = None
        if pace is not None:
            self._pacer = Pacer(pace.time_of(prepared.place.rank), self.synchronisation)
        self.workers = self._make_workers(batch_of, seed, autocast)
        self._readiness = self._make_readiness(shared)
        transport = transport_of(self.device, dist.get_backend())
        self.runtime = PipelineRuntime(
            self._told_workers(),
            prepared.program,
            self.synchronisation.start,
            WatchedTransport(transport) if watch else transport,
            self._recorder,
            None if self._pacer is None else self._pacer.clock.waited,
        )

    def _connect(self, timeout: timedelta | None) -> list[SharedGradients]:
        """Make process groups, all ranks together; what this rank shares, in their order."""
        rank_of = {device: rank for rank, device in enumerate(self.plan.ranks)}
        shared = shared_parameters(self.plan)
        self._replicas = {
            stage.index: tuple(sorted(rank_of[d] for d in stage.devices))
            for stage in self.plan.stages
        }
        sets = [row.ranks for row in shared] + [r for r in self._replicas.values() if len(r) > 1]
        self._process_groups: dict[tuple[int, ...], Any] = make_process_groups(sets, timeout)
        names = {row.reduce: row.names for row in shared}
        return [
            SharedGradients(action, {name: self.parameters[name] for name in names[action]})
            for action in self.prepared.program
            if isinstance(action, Reduce)
        ]

    def _strategy(self, shared: Sequence[SharedGradients]) -> Synchronisation:
        setting = Setting(
            options_of(self.plan.sync),
            shared,
            self._process_groups,
            self._recorder,
            self.optimisation,
            own_shares(self.plan, self.prepared.place.rank),
        )
        return make_strategy(self.plan, setting)

    def _make_workers(
        self, batch_of: BatchOf, seed: int, autocast: torch.dtype | None
    ) -> dict[int, TrainingWorker]:
        told = self._pacer or self.synchronisation
        before_use = told.before_use if self.synchronisation.gated else None
        workers = {}
        for stage in self.prepared.stages:
            split = {o.microbatch for o in self._order if o.stage == stage.index and o.kind == "W"}
            microbatches = self.plan.microbatches
            runner = StageRunner(stage, microbatches, split, self.device, autocast, before_use)
            workers[stage.index] = TrainingWorker(runner, batch_of, seed, self.device)
        return workers

    def _make_readiness(self, shared: Sequence[SharedGradients]) -> Readiness | None:
        if not self.synchronisation.announced:
            return None
        parameters = {name: p for row in shared for name, p in row.parameters.items()}
        users = {name: row.reduce.stages for row in shared for name in row.parameters}
        last = last_backwards(self._order, users)
        readiness = Readiness(parameters, last, (self._pacer or self.synchronisation).ready)
        for worker in self.workers.values():
            worker.runner.added = readiness.added
        return readiness

    def _told_workers(self) -> Mapping[int, Worker]:
        """The stages as the step loop runs them."""
        told: dict[int, Worker] = {}
        for index, worker in self.workers.items():
            split = worker.runner.split
            told[index] = worker
            if self._readiness is not None:
                told[index] = AnnouncingWorker(told[index], index, split, self._readiness)
            if self._pacer is not None:
                told[index] = self._paced(told[index], index, split, self._pacer)
        return told

    def _paced(
        self, worker: Worker, index: int, split: Collection[int], pacer: Pacer
    ) -> PacedWorker:
        pipeline, device = place_plan(self.plan), self.plan.ranks[self.prepared.place.rank]
        moments = LayerMoments.of(pipeline, index, device, self.parameters)
        return PacedWorker(worker, split, pipeline.stages[index].times[device], moments, pacer)

    def forward_backward(self, step: int) -> float:
        """All microbatches of one iteration and the synchronisation of their gradients.

        Returns:
            This rank's share of the mean loss.
        """
        self._recorder.begin()
        if self._pacer is not None and self._pace is not None:
            # Of this rank's own iterations, whatever the steps of the whole are called.
            pause_s = self._pace.pause_s(self.prepared.place.rank, next(self._iterations))
            self._pacer.clock.begin(pause_s)
        self.optimisation.zero_gradients()
        self.synchronisation.begin(step)
        if self._readiness is not None:
            self._readiness.begin_iteration()
        for worker in self.workers.values():
            worker.step = step
            worker.runner.loss_scale = self.optimisation.scale
        loss = self.runtime.step() / self.plan.microbatches
        self.synchronisation.finish()
        self._synchronise_statistics()
        return loss

    def _synchronise_statistics(self) -> None:
        """Buffers that forwards write: the same on all replicas, as of one process."""
        for index, worker in sorted(self.workers.items()):
            statistics = worker.runner.statistics
            observed = statistics.observed()
            if observed is not None and len(self._replicas[index]) > 1:
                with talking_to(f"the other ranks of stage {index}, to share what they observed"):
                    dist.all_reduce(observed, group=self._process_groups[self._replicas[index]])
            statistics.apply(observed)

    def step(self, step: int) -> StepMetrics:
        """One iteration with its optimizer step; all ranks wait for each other's metrics."""
        return self.iterate(step).metrics()

    def iterate(self, step: int) -> Gathering:
        """One iteration, after which ranks wait for each other only if their strategy does."""
        loss = self.forward_backward(step)
        start = self._recorder.mark()
        outcome = self.synchronisation.update(lambda: self.optimise(step))
        self._recorder.note("optimizer", None, start)
        self.record = self._recorder.record()
        return Gathering(self.plan, step, loss, self.record, self.device, outcome)

    def settle(self) -> None:
        """Bring to an end what is under way: the weights are those after the last iteration.

        All ranks call it together, before anybody reads the weights.
        """
        self.synchronisation.settle()

    def close(self) -> None:
        """No iteration follows; all ranks call it."""
        self.synchronisation.settle()
        self.synchronisation.close()
