"""One rank's iterations: computation, synchronisation of gradients, and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.distributed.host_tuning import keep_freed_memory
from executor.distributed.member_group import (
    ProcessGroupMembers,
    TensorParallelGroup,
    sum_partial_gradients,
)
from executor.emulation.pace import Pace, Pacer
from executor.launch.prepare import Prepared
from executor.runtime.lowering import lower_forwards, members_by_rank
from executor.runtime.runtime import PipelineRuntime, Recorder, StepRecord, clock_of
from executor.runtime.transport import (
    Transport,
    make_channels,
    open_communicators,
    open_groups,
)
from executor.runtime.worker import OperationObserver, Worker
from executor.split.stage_module import StageModule
from executor.stage.divided import LayerWeights
from executor.stage.offload import StashReturn
from executor.stage.recompute import BeforeUse
from executor.stage.runner import StageRunner, TrainingWorker
from executor.stage.token_mean import TokenMean
from executor.stage.weight_gradients import Added, ignore
from executor.sync import Setting, Synchronisation, make_strategy
from executor.sync.divided_layers import DividedLayer, DividedLayers
from executor.sync.gradients import (
    GradientReadiness,
    SharedGradients,
    buckets_by_reduction,
    last_backwards,
)
from executor.sync.shared_parameters import (
    ParameterOwners,
    divided_parameters,
    make_process_groups,
    own_shares,
    planned_split,
    shared_parameters,
)
from executor.training.agreement import BatchDigests
from executor.training.data import BatchOf, DeviceBatches, within
from executor.training.loop import Gathering, StepMetrics
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import Optimisation, StepOutcome
from executor.training.optimizer import job_optimizer
from executor.training.state_shards import StateShards
from executor.training.validation import ForwardWorker, Validation, microbatches_of
from planner.plan.programs import Reduce, directions
from planner.plan.stash_offload import brought_back_during
from planner.sync.strategies import AllReduceOptions, options_of


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


def optimisation_of(
    prepared: Prepared, make_optimizer: MakeOptimizer | None = None, **settings: Any
) -> Optimisation:
    """Return the optimisation of this rank's parameters.

    Args:
        prepared: what this rank runs.
        make_optimizer: makes the optimizer of parameters by name; default the job's.
        **settings: see :class:`Optimisation`.
    """
    plan, rank = prepared.plan, prepared.place.rank
    owners, shards = ParameterOwners.of_plan(plan), None
    counted = owners.first_held(rank)
    if plan.job.shards_state:
        shared = shared_gradients(prepared)
        options = options_of(plan.sync)
        assert isinstance(options, AllReduceOptions)
        buckets = buckets_by_reduction(shared, options.bucket_mib)
        shards = StateShards(buckets, rank, divided_layers(prepared))
        # Each element is in a slice of one rank; of what members of a group have whole, one counts.
        is_first = plan.place_of(rank).member == 0
        whole = [n for n in shards.shared if is_first or owners.is_split(n)]
        counted = counted - shards.shared | frozenset(whole)
    return Optimisation(
        prepared.parameters,
        counted,
        make_optimizer or partial(job_optimizer, plan.job),
        device=prepared.device,
        shards=shards,
        **settings,
    )


def divided_layers(prepared: Prepared) -> list[DividedLayer]:
    """Return the layers of a rank whose weights its replicas divide; whole until training begins.

    Raises:
        PipeplanError: if one has weights of several types.
    """
    rank, parameters = prepared.place.rank, prepared.parameters
    return [
        DividedLayer(
            row.layer,
            {name: parameters[name] for name in row.names},
            Reduce((row.stage,), row.ranks),
            rank,
        )
        for row in divided_parameters(prepared.plan)
        if rank in row.ranks
    ]


def shared_gradients(prepared: Prepared) -> list[SharedGradients]:
    """Return what a rank shares with others, in the order in which they reduce it."""
    names = {row.reduce: row.names for row in shared_parameters(prepared.plan)}
    return [
        SharedGradients(action, {name: prepared.parameters[name] for name in names[action]})
        for action in prepared.program
        if isinstance(action, Reduce)
    ]


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
        digests_of: returns the digests of a step's batches, see :class:`BatchDigests`.

    Attributes:
        members: of this rank's tensor-parallel group; None if it is in none.
        process_groups: by their ranks.
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
        plan, place = prepared.plan, prepared.place
        self.plan = plan
        self.parameters = prepared.parameters
        self.optimisation = optimisation
        self._prepared = prepared
        self._replica = plan.place_of(place.rank).replica
        self._device = prepared.device
        self._optimise = optimise or optimisation.step
        self._digests_of = digests_of
        self._recorder = Recorder(clock_of(self._device))
        self._pending = self._recorder.end()
        self._transport = self._connect(timeout, watches=watch)
        self._divided = self._connect_layers(timeout)
        split = planned_split(plan, plan.place_of(place.rank).members)
        summed = () if split is None else split.summed_parameters
        self._partial = [self.parameters[n] for n in sorted(summed) if n in self.parameters]
        shared = shared_gradients(prepared)
        self._synchronisation = self._strategy(shared)
        self._pacer = None
        if pace is not None:
            self._pacer = Pacer.of_plan(
                plan, place.rank, pace, self.parameters, self._synchronisation, emulates=emulates
            )
        self._readiness = self._make_readiness(shared)
        self._offloads = [bool(stage.offload) for stage in plan.stages]
        self._workers = {part.index: make_worker(part) for part in self._parts()}
        observers: list[OperationObserver] = [
            observer for observer in (self._pacer, self._readiness) if observer is not None
        ]
        if any(self._offloads):
            orders = {self._replica: plan.parsed_orders()[self._replica]}
            observers.append(StashReturn(self._workers, orders, self._offloads))
        self._runtime = PipelineRuntime(
            self._workers,
            prepared.program,
            self._synchronisation.start,
            self._transport,
            self._recorder,
            observers,
            None if self._pacer is None else self._pacer.clock.waited,
            prepared.messages,
        )

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
        plan, device = prepared.plan, prepared.device
        stages = {stage.index: stage for stage in prepared.stages}
        by_length = [{s.index: s for s in row} for row in prepared.shorter] + [stages]
        lengths = plan.job.lengths
        limited = within(batch_of, prepared.lookups)
        checked = BatchDigests(limited, plan.microbatches, first_step)

        def runner_of(stage: StageModule, part: StagePart) -> StageRunner:
            return StageRunner(
                stage,
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

        def lengths_of(step: int) -> Sequence[int]:
            return () if lengths is None else lengths.of_iteration(step, plan.microbatches)

        def make_worker(part: StagePart) -> Worker:
            runners = [runner_of(row[part.index], part) for row in by_length]
            names = stages[part.index].model_inputs
            batches = DeviceBatches.of(checked, names, part.microbatches, device)
            mean = TokenMean(device, part.replicas) if over_tokens else None
            return TrainingWorker(runners, batches, prepared.seed, lengths_of, mean)

        optimisation = optimisation or optimisation_of(prepared)
        return cls(prepared, optimisation, make_worker, digests_of=checked.take, **options)

    def _connect(self, timeout: timedelta | None, *, watches: bool) -> Transport:
        """Make process groups and open them, all ranks together; return what messages go over."""
        plan = self.plan
        replicas = {
            (stage.index, member): tuple(sorted(ranks))
            for stage in plan.stages
            for member, ranks in enumerate(zip(*map(plan.ranks_of, stage.devices), strict=True))
        }
        groups = members_by_rank(plan)
        sets = [row.ranks for row in shared_parameters(plan)]
        sets += [ranks for ranks in replicas.values() if len(ranks) > 1]
        self.process_groups = make_process_groups([*sets, *groups.values()], timeout)
        rank = self._prepared.place.rank
        mine = plan.place_of(rank).member
        self._replicas = {stage: r for (stage, member), r in replicas.items() if member == mine}
        self.members = (
            ProcessGroupMembers(self.process_groups[groups[rank]], self._recorder)
            if rank in groups
            else None
        )
        ends = directions(self.plan)
        channels = make_channels(ends, self._device, timeout)
        transport = Transport(self._device, channels, watches=watches)
        open_communicators(transport, ends, self.process_groups, self._device)
        return transport

    def _connect_layers(self, timeout: timedelta | None) -> DividedLayers:
        """Make process groups of their own for layers that replicas divide; all ranks together."""
        sets = [row.ranks for row in divided_parameters(self.plan)]
        groups = make_process_groups(sets, timeout)
        open_groups(groups, self._device)
        shards = self.optimisation.shards
        rows = () if shards is None else shards.divided_weights
        return DividedLayers([row for row in rows if isinstance(row, DividedLayer)], groups)

    def _strategy(self, shared: Sequence[SharedGradients]) -> Synchronisation:
        setting = Setting(
            options_of(self.plan.sync),
            shared,
            self.process_groups,
            self._recorder,
            self.optimisation,
            own_shares(self.plan, self._prepared.place.rank),
            self.plan.job.shards_state,
            self._divided,
        )
        return make_strategy(self.plan, setting)

    def _make_readiness(self, shared: Sequence[SharedGradients]) -> GradientReadiness | None:
        if not self._synchronisation.announced:
            return None
        parameters = {name: p for row in shared for name, p in row.parameters.items()}
        users = {name: row.reduce.stages for row in shared for name in row.parameters}
        order = self.plan.parsed_orders()[self._replica]
        announce = (self._pacer or self._synchronisation).ready
        return GradientReadiness(parameters, last_backwards(order, users), announce)

    def _parts(self) -> list[StagePart]:
        """Return the stages of this rank, with what they call."""
        device = self._replica
        order = self.plan.parsed_orders()[device]
        back = brought_back_during({device: order}, self._offloads).values()
        synchronisation = self._synchronisation
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
                None if self.members is None else TensorParallelGroup(self.members),
                {layer.name: layer for layer in self._divided.layers},
                self.process_groups.get(self._replicas[stage.index]),
            )
            for stage in self.plan.stages
            if device in stage.devices
        ]

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
        if self.members is not None:
            sum_partial_gradients(self.members, self._partial)
            # All members have it, and the ranks' losses are added up.
            loss = loss if self.members.index == 0 else torch.zeros_like(loss)
        self._synchronise_statistics()
        return loss

    def _synchronise_statistics(self) -> None:
        """Give all replicas the buffers that one process would have written."""
        for index, worker in sorted(self._workers.items()):
            if worker.statistics is None:
                continue
            observed = worker.statistics.observed()
            if observed is not None and len(self._replicas[index]) > 1:
                with talking_to(f"the other ranks of stage {index}, to share what they observed"):
                    dist.all_reduce(observed, group=self.process_groups[self._replicas[index]])
            worker.statistics.apply(observed)

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
        digests = self._digests_of(step)
        return Gathering(self.plan, step, record, loss, self._device, outcome, digests)

    def validation(self, batch_of: BatchOf, microbatches: int, *, over_tokens: bool) -> Validation:
        """Return this rank's part of validations, of which the stages were prepared.

        Args:
            batch_of: returns the batch of step 0 and a microbatch.
            microbatches: of a validation.
            over_tokens: whether the loss is the mean over all tokens.
        """
        prepared, device = self._prepared, self._device
        group = None if self.members is None else TensorParallelGroup(self.members)
        program = lower_forwards(self.plan, microbatches)[self._prepared.place.rank]
        workers = {}
        for stage in prepared.evaluation:
            runner = StageRunner(
                stage, microbatches, device=device, autocast=prepared.autocast, group=group
            )
            mine = microbatches_of(program, stage.index)
            batches = DeviceBatches(batch_of, stage.model_inputs, mine, device, None)
            workers[stage.index] = ForwardWorker(
                runner, batches, prepared.seed, over_tokens=over_tokens
            )
        # All members of a group have its loss.
        counts = self.members is None or self.members.index == 0
        return Validation(workers, program, self._transport, device, counts=counts)

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
