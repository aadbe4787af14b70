"""Training by a plan, one rank of it: iterations, their synchronisation, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from executor.arrivals import WatchedTransport
from executor.clock import clock_of
from executor.failure import talking_to
from executor.holders import Holders
from executor.learning_rate import Factor
from executor.loss_scale import LossScale
from executor.master_weights import MakeOptimizer
from executor.metrics import StepMetrics, gather_metrics
from executor.optimisation import Optimisation, Outcome
from executor.optimizer import job_optimizer
from executor.prepare import Prepared
from executor.recorder import Recorder, StepRecord
from executor.runtime import PipelineRuntime
from executor.stage.runner import StageRunner
from executor.sync import STRATEGIES
from executor.sync.all_reduce import GradientBuckets
from executor.sync.groups import make_process_groups, shared_parameters
from executor.training_worker import BatchOf, TrainingWorker
from executor.transport import transport_of


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
    ) -> None:
        self.prepared = prepared
        self.plan = prepared.plan
        self.device = prepared.device
        self.parameters = prepared.parameters
        self.holders = Holders.of_plan(self.plan)
        self.record = StepRecord()
        self._recorder = Recorder(clock_of(self.device))
        self.workers = self._make_workers(batch_of, seed, autocast)
        self._connect(timeout, watch)
        self.optimisation = Optimisation(
            self.parameters,
            self.holders.first_held(prepared.place.rank),
            optimizer_of or partial(job_optimizer, self.plan.job),
            clip_norm=clip_norm,
            factor=factor,
            loss_scale=loss_scale,
        )
        self.optimise: Callable[[int], Outcome] = self.optimisation.step

    def _make_workers(
        self, batch_of: BatchOf, seed: int, autocast: torch.dtype | None
    ) -> dict[int, TrainingWorker]:
        order = self.plan.parsed_orders()[self.plan.ranks[self.prepared.place.rank]]
        workers = {}
        for stage in self.prepared.stages:
            split = {op.microbatch for op in order if op.stage == stage.index and op.kind == "W"}
            runner = StageRunner(stage, self.plan.microbatches, split, self.device, autocast)
            workers[stage.index] = TrainingWorker(runner, batch_of, seed, self.device)
        return workers

    def _connect(self, timeout: timedelta | None, watch: bool) -> None:
        """Make process groups and what uses them; all ranks do so together."""
        rank_of = {device: rank for rank, device in enumerate(self.plan.ranks)}
        shared = shared_parameters(self.plan)
        self._replicas = {
            stage.index: tuple(sorted(rank_of[d] for d in stage.devices))
            for stage in self.plan.stages
        }
        sets = [row.ranks for row in shared] + [r for r in self._replicas.values() if len(r) > 1]
        self._process_groups: dict[tuple[int, ...], Any] = make_process_groups(sets, timeout)
        mine = [row for row in shared if self.prepared.place.rank in row.ranks]
        buckets = {
            row.reduce: GradientBuckets([self.parameters[name] for name in row.names])
            for row in mine
        }
        self._gradients: Sequence[GradientBuckets] = list(buckets.values())
        self.synchronisation = STRATEGIES[self.plan.sync.strategy](
            {reduce: bucket.buffers for reduce, bucket in buckets.items()},
            self._process_groups,
            self._recorder,
        )
        transport = transport_of(self.device, dist.get_backend())
        self.runtime = PipelineRuntime(
            self.workers,
            self.prepared.program,
            self.synchronisation.start,
            WatchedTransport(transport) if watch else transport,
            self._recorder,
        )

    def forward_backward(self, step: int) -> float:
        """All microbatches of one iteration and the synchronisation of their gradients.

        Returns:
            This rank's share of the mean loss.
        """
        self._recorder.begin()
        self.optimisation.zero_gradients()
        for bucket in self._gradients:
            bucket.begin()
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
        """One iteration with its optimizer step; all ranks return the same metrics."""
        loss = self.forward_backward(step)
        start = self._recorder.mark()
        outcome = self.optimise(step)
        self._recorder.note("optimizer", None, start)
        self.record = self._recorder.record()
        return gather_metrics(self.plan, step, loss, self.record, self.device, outcome)
