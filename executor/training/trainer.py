"""One rank's iterations: computation, synchronisation of gradients, and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.distributed.failure import talking_to
from executor.distributed.host_tuning import keep_freed_memory
from executor.distributed.member_group import TensorParallelGroup, sum_partial_gradients
from executor.emulation.pace import Pace, Pacer
from executor.launch.prepare import Prepared
from executor.runtime.runtime import PipelineRuntime, Recorder, StepRecord, clock_of
from executor.runtime.worker import OperationObserver, Worker
from executor.stage.divided import LayerWeights
from executor.stage.offload import StashReturn
from executor.stage.recompute import BeforeUse
from executor.stage.runner import StageRunner
from executor.stage.token_mean import TokenMean
from executor.stage.weight_gradients import Added, ignore
from executor.sync import Setting, make_strategy
from executor.sync.gradients import GradientReadiness, SharedGradients, last_backwards
from executor.sync.shared_parameters import own_shares, planned_split
from executor.training.agreement import CheckedBatches
from executor.training.batches import BatchOf
from executor.training.connections import Connections
from executor.training.loop import Gathering, StepMetrics
from executor.training.optimisation import Optimisation, StepOutcome
from executor.training.rank_optimisation import optimisation_of, shared_gradients
from executor.training.workers import DeviceBatches, TrainingWorker
from planner.plan.operations import Operation
from planner.plan.stash_offload import brought_back_during
from planner.sync.strategies import options_of


@dataclass(frozen=True)
class StagePart:
    """A stage as a rank is to run it.

    Attributes:
        index: its number.
        microbatches: those whose forward this rank runs, in order.
        split: the microbatches whose backward is split on this rank.
        offloaded: those whose stashes of offloaded layers travel to the host.
        before_use: called before a forward uses parameters; None: no one waits for them.
        added: called with each parameter whose gradient something other than autograd has added to.
        pacer: the rank's; None if operations take their own time.
        group: the tensor-parallel group that the rank is in, if it is in one.
        divided: weights of the layers that replicas divide, by layer.
        replicas: process group of the stage's replicas; None: it has one.
    """

    index: int
    microbatches: tuple[int, ...]
    split: frozenset[int]
    offloaded: frozenset[int]
    before_use: BeforeUse | None
    added: Added
    pacer: Pacer | None
    group: TensorParallelGroup | None
    divided: Mapping[str, LayerWeights]
    replicas: Any = None


MakeWorker = Callable[[StagePart], Worker]


class Trainer:
    """This rank's part of a plan, trained or emulated, in a process group that exists.

    Args:
        prepared: what this rank runs.
        optimisation: the optimizer of its parameters.
        make_worker: makes what runs a stage.
        optimise: the optimizer's part of a step; default ``optimisation.step``.
        timeout: of collectives.
        watch: whether arrivals of messages are noted, for a timeline.
        pace: operations take the time that the plan's costs and it say; None: their own.
        emulates: whether nothing is computed, and the optimizer step is timed as well.
        digests_of: returns the digests of a step's batches, see :class:`CheckedBatches`.

    Attributes:
        connections: to the other ranks.
    """

    def __init__(
        self,
        prepared: Prepared,
        optimisation: Optimisation,
        make_worker: MakeWorker,
        *,
        optimise: Callable[[int], StepOutcome] | None = None,
        timeout: timedelta | None = None,
        watch: bool = False,
        pace: Pace | None = None,
        emulates: bool = False,
        digests_of: Callable[[int], Sequence[float]] = lambda step: (),
    ) -> None:
        plan, rank = prepared.plan, prepared.place.rank
        self.plan = plan
        self.parameters = prepared.parameters
        self.optimisation = optimisation
        self._prepared = prepared
        self._optimise = optimise or optimisation.step
        self._digests_of = digests_of
        self._recorder = Recorder(clock_of(prepared.device))
        self._pending = self._recorder.end()
        self.connections = connections = Connections.open(
            prepared, optimisation.shards, self._recorder, timeout, watches=watch
        )
        self._partial = _summed_parameters(prepared)
        shared = shared_gradients(prepared)
        groups, divides = connections.process_groups, plan.job.shards_state
        shares, layers = own_shares(plan, rank), connections.divided
        rest = self._recorder, optimisation, shares, divides, layers
        setting = Setting(options_of(plan.sync), shared, groups, *rest)
        self._synchronisation = synchronisation = make_strategy(plan, setting)
        self._pacer = None
        if pace is not None:
            self._pacer = Pacer.of_plan(
                plan, rank, pace, self.parameters, synchronisation, emulates=emulates
            )
        replica = plan.place_of(rank).replica
        order = plan.parsed_orders()[replica]
        self._readiness = self._announcing(shared, order) if synchronisation.announced else None
        offloads = [bool(stage.offload) for stage in plan.stages]
        self._workers = {part.index: make_worker(part) for part in self._parts(offloads)}
        observers: list[OperationObserver] = [
            observer for observer in (self._pacer, self._readiness) if observer is not None
        ]
        if any(offloads):
            observers.append(StashReturn(self._workers, {replica: order}, offloads))
        self._runtime = PipelineRuntime(
            self._workers,
            prepared.program,
            synchronisation.start,
            connections.transport,
            self._recorder,
            observers,
            None if self._pacer is None else self._pacer.clock.waited,
            prepared.messages,
        )

    def _announcing(
        self, shared: Sequence[SharedGradients], order: Sequence[Operation]
    ) -> GradientReadiness:
        """Return what announces gradients to the synchronisation as soon as they are ready."""
        parameters = {name: p for row in shared for name, p in row.parameters.items()}
        users = {name: row.reduce.stages for row in shared for name in row.parameters}
        announce = (self._pacer or self._synchronisation).ready
        return GradientReadiness(parameters, last_backwards(order, users), announce)

    @classmethod
    def of_model(
        cls,
        prepared: Prepared,
        batch_of: BatchOf,
        *,
        first_step: int = 1,
        optimisation: Optimisation | None = None,
        over_tokens: bool = False,
        **options: Any,
    ) -> Trainer:
        """Train this rank's stages of a model.

        Args:
            prepared: what this rank runs.
            batch_of: returns the batch of a step and microbatch; called only for what this rank's
                stages read.
            first_step: that will be run.
            optimisation: default the job's optimizer.
            over_tokens: whether the loss is the mean over all tokens of an iteration, not over its
                microbatches.
            **options: see :class:`Trainer`.
        """
        if prepared.device.type == "cpu":
            keep_freed_memory()
        plan, device, lengths = prepared.plan, prepared.device, prepared.plan.job.lengths
        by_length = [{s.index: s for s in row} for row in (*prepared.shorter, prepared.stages)]
        checked = CheckedBatches(batch_of, prepared.lookups, plan.microbatches, first_step)

        def lengths_of(step: int) -> Sequence[int]:
            return () if lengths is None else lengths.of_iteration(step, plan.microbatches)

        def make_worker(part: StagePart) -> Worker:
            runners = [
                StageRunner(
                    row[part.index],
                    plan.microbatches,
                    part.split,
                    device,
                    prepared.autocast,
                    part.before_use,
                    part.added,
                    part.group,
                    part.offloaded,
                    part.divided,
                )
                for row in by_length
            ]
            names = runners[-1].stage.model_inputs
            batches = DeviceBatches(checked, names, part.microbatches, device)
            mean = TokenMean(device, part.replicas) if over_tokens else None
            return TrainingWorker(runners, batches, prepared.seed, lengths_of, mean)

        optimisation = optimisation or optimisation_of(prepared)
        return cls(prepared, optimisation, make_worker, digests_of=checked.take, **options)

    def _parts(self, offloads: Sequence[bool]) -> list[StagePart]:
        """Return the stages of this rank, with what they call."""
        connections, synchronisation = self.connections, self._synchronisation
        replica = self.plan.place_of(self._prepared.place.rank).replica
        order = self.plan.parsed_orders()[replica]
        back = brought_back_during({replica: order}, offloads).values()
        before_use = (self._pacer or synchronisation).before_use if synchronisation.gated else None
        added = ignore if self._readiness is None else self._readiness.added
        return [
            StagePart(
                stage.index,
                tuple(o.microbatch for o in order if o.stage == stage.index and o.kind == "F"),
                frozenset(o.microbatch for o in order if o.stage == stage.index and o.kind == "W"),
                frozenset(o.microbatch for o in back if o.stage == stage.index),
                before_use,
                added,
                self._pacer,
                connections.group,
                {layer.name: layer for layer in connections.divided.layers},
                connections.replicas_of(stage.index),
            )
            for stage in self.plan.stages
            if replica in stage.devices
        ]

    def step(self, step: int) -> StepMetrics:
        """Run one iteration with its optimizer step, and wait for all ranks' metrics."""
        return self.iterate(step).metrics()

    def iterate(self, step: int) -> Gathering:
        """Run one iteration; ranks wait for each other only if their strategy does."""
        loss = self.forward_backward(step)
        start = self._recorder.mark()
        outcome = self._synchronisation.update(lambda: self._optimise(step))
        if self._pacer is not None:
            self._pacer.after_update()
        self._recorder.note("optimizer", None, start)
        waited_s = sum(worker.batch_wait_s for worker in self._workers.values())
        record = self._pending = self._recorder.end(waited_s)
        device, digests = self._prepared.device, self._digests_of(step)
        return Gathering(self.plan, step, record, loss, device, outcome, digests)

    def forward_backward(self, step: int) -> Tensor:
        """Run all microbatches of one iteration, and synchronise their gradients.

        Returns:
            This rank's part of the mean loss, a scalar that the device may have yet to compute.
        """
        self._recorder.begin()
        if self._pacer is not None:
            self._pacer.begin_iteration()
        self.optimisation.zero_gradients()
        self._synchronisation.begin(step)
        if self._readiness is not None:
            self._readiness.begin_iteration()
        for worker in self._workers.values():
            worker.begin(step, self.optimisation.scale)
        loss = self._runtime.step() / self.plan.microbatches
        self._synchronisation.finish()
        if self.connections.members is not None:
            sum_partial_gradients(self.connections.members, self._partial)
        self._synchronise_statistics()
        # All members of a group have it, and the ranks' losses are added up.
        return loss if self.connections.is_first_member else torch.zeros_like(loss)

    def _synchronise_statistics(self) -> None:
        """Give all replicas the buffers that one process would have written."""
        for index, worker in sorted(self._workers.items()):
            if worker.statistics is None:
                continue
            observed, group = worker.statistics.observed(), self.connections.replicas_of(index)
            if observed is not None and group is not None:
                with talking_to(f"the other ranks of stage {index}, to share what they observed"):
                    dist.all_reduce(observed, group=group)
            worker.statistics.apply(observed)

    @property
    def record(self) -> StepRecord:
        """What this rank did in the last iteration; waits for its device."""
        return self._pending.wait()

    def settle(self) -> None:
        """Bring to an end what is under way: the weights are those after the last iteration.

        All ranks call it together, before anybody reads the weights.
        """
        self._synchronisation.settle()

    def close(self) -> None:
        """End the training; all ranks call it."""
        self._synchronisation.settle()
        self._synchronisation.close()


def _summed_parameters(prepared: Prepared) -> list[nn.Parameter]:
    """Return parameters of which each member of a tensor-parallel group has a part of the gradient.

    Args:
        prepared: what this rank runs.
    """
    plan = prepared.plan
    split = planned_split(plan, plan.place_of(prepared.place.rank).members)
    summed = () if split is None else split.summed_parameters
    return [prepared.parameters[name] for name in sorted(summed) if name in prepared.parameters]
