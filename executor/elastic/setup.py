"""Preparation of one rank of decentralized training, before it meets the other pipelines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.coordinator.client import Client
from executor.coordinator.store import ABOUT
from executor.coordinator.supervised import CoordinatorWork, SupervisedCoordinator, work_of
from executor.distributed.process_group import device_of_this_process, require_backend
from executor.elastic.faults import parse_faults
from executor.elastic.rank_assignment import new_incarnation, rank_assignment_of
from executor.elastic.trace import WholeSteps
from executor.launch.config import TrainingConfig
from executor.launch.console import print_error
from executor.launch.prepare import Prepared, prepare
from executor.launch.rank_options import DEFAULT_GROUP_TIMEOUT_S, require_timeout
from executor.launch.run import RunSettings, autocast_of, loss_scale_of, optimizer_of
from executor.sync.averaging import local_optimizer
from executor.training.agreement import make_equal
from executor.training.beginning import Beginning
from executor.training.feed import Feed
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import Optimisation
from executor.training.optimizer_check import require_divisible
from executor.training.rank_optimisation import optimisation_of
from executor.training.saved_state import SavedState
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Plan, Sync
from planner.prediction import predict, replay
from planner.records.document import require_file_path
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS, PipelineReplica, pipeline_replicas_of
from planner.sync.strategies import options_of
from planner.verification import require_valid


def pipeline_replica_plan(plan: Plan, replica: PipelineReplica) -> Plan:
    """The plan of one pipeline: its devices, and its microbatches numbered from 0.

    Its iteration time is predicted again, without the other pipelines' synchronisation; no bound is
    claimed for it.

    Args:
        plan: that the pipeline is one of.
        replica: found by :func:`~planner.sync.pipeline_replicas.pipeline_replicas_of`.
    """
    number = {microbatch: index for index, microbatch in enumerate(replica.microbatches)}
    mine = set(replica.devices)
    orders = {
        device: " ".join(str(Operation(s, k, number[m])) for s, k, m in order)
        for device, order in plan.parsed_orders().items()
        if device in mine
    }
    stages = tuple(
        stage.model_copy(update={"devices": tuple(d for d in stage.devices if d in mine)})
        for stage in plan.stages
    )
    count = len(replica.microbatches)
    alone = plan.model_copy(
        update={
            "job": plan.job.model_copy(update={"microbatches": count}),
            "stages": stages,
            "microbatches": count,
            "orders": orders,
            "ranks": replica.devices,
            "sync": Sync(),
            "provenance": plan.provenance.model_copy(update={"problem_digest": None}),
        }
    )
    return alone.model_copy(update={"predicted": predict(replay(alone), 0.0), "proof": None})


class Setup:
    """Everything that this rank has read, checked and built on its own.

    Args:
        plan: with all pipelines, and the strategy.
        config: of the training.
        run: how it is run.

    Attributes:
        replicas: the pipelines of the plan.
        assignment: of this process.
        options: of the strategy.
        injected: faults on purpose, of all pipelines.
        device: of this process.
        prepared: this rank's stages.
        saved: its part of a checkpoint.
        checkpoint: that the training goes on from, if any.
        steps: of the whole training.
        feed: of this pipeline.

    Raises:
        PipeplanError: if the plan cannot be run so.
    """

    def __init__(self, plan: Plan, config: TrainingConfig, run: RunSettings) -> None:
        require_valid(plan)
        _require_known(config)
        self.plan = plan
        self.config = config
        self.run = run
        self.replicas = pipeline_replicas_of(plan)
        self.assignment = rank_assignment_of(plan, self.replicas, run.pipeline, run.coordinator)
        self.options = options_of(plan.sync)
        if run.group_timeout_s is not None:
            require_timeout(run.group_timeout_s, "group_timeout_s")
        self.injected = parse_faults(run.inject, len(self.replicas))
        if run.sync_trace is not None:
            require_file_path(run.sync_trace)
        self.device = device_of_this_process(run.device)
        require_backend(run.backend, self.device)
        self.prepared = self._prepare()
        self.saved = SavedState(self.prepared, config)
        self.checkpoint = self._begins()
        before = self.saved.require_fits(self.checkpoint)
        self.steps = WholeSteps(before, len(self.replicas))
        self.feed = Feed(self.prepared, config, run.data, self.checkpoint, 1)
        if self.assignment.prints and self.assignment.pipeline == 0:
            self.feed.warn_if_nothing_is_drawn()

    def _begins(self) -> Checkpoint | None:
        """Return the checkpoint that the training resumes from."""
        run, assignment = self.run, self.assignment
        if assignment.part is None:
            # A pipeline that comes back alone takes up the others' weights.
            return None if run.resume is None else Checkpoint.open(run.resume)
        first = assignment.pipeline + assignment.place.rank
        beginning = Beginning(self.config, run, first)
        found = beginning.agreed(Ranks.alone(), self.saved.require_fits)
        beginning.tell(self.config.steps)
        return found

    def _prepare(self) -> Prepared:
        return prepare(
            pipeline_replica_plan(self.plan, self.replicas[self.assignment.pipeline]),
            self.run.model,
            loss=self.run.loss,
            seed=self.config.seed,
            device=self.device,
            autocast=autocast_of(self.config),
            place=self.assignment.place,
            # All pipelines have the same stages.
            check=self.run.check and self.assignment.pipeline == 0,
        )

    @property
    def work(self) -> CoordinatorWork:
        """What the coordinator hands out."""
        return work_of(self.plan, self.config.steps - self.steps.before, self.plan.sync)

    @property
    def share_size(self) -> int:
        """Microbatches of a share."""
        return len(self.replicas[self.assignment.pipeline].microbatches)

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """The function that makes the optimizer of parameters by name."""
        return optimizer_of(self.plan, self.config, self.run.optimizer)

    def optimisation(self) -> Optimisation:
        """Return this rank's, where it goes on from a checkpoint if there is one."""
        make_equal(self.prepared, resumes=self.checkpoint is not None)
        if self.run.optimizer is not None or self.config.optimizer is not None:
            make, saves = self.make_optimizer, self.config.checkpoint is not None
            strategy = self.plan.sync.strategy
            require_divisible(self.prepared, make, saves=saves, strategy=strategy)
        optimisation = optimisation_of(
            self.prepared,
            local_optimizer(self.options, self.make_optimizer),
            clip_norm=self.config.clip_norm,
            factor=self.steps.by_share(self.config.rate_factor()),
            loss_scale=loss_scale_of(self.plan, self.config),
            skip_non_finite=self.config.skip_non_finite,
        )
        if self.checkpoint is not None:
            self.saved.load(self.checkpoint, optimisation)
        return optimisation

    @property
    def ranks(self) -> list[int]:
        """Ranks of this pipeline in the whole plan."""
        devices = self.replicas[self.assignment.pipeline].devices
        return [self.plan.ranks.index(device) for device in devices]

    @property
    def group_timeout_s(self) -> float:
        """Whoever lets others of its group wait for so long is left out."""
        given_s = self.run.group_timeout_s
        return DEFAULT_GROUP_TIMEOUT_S if given_s is None else given_s


def _require_known(config: TrainingConfig) -> None:
    if config.timeline is not None:
        raise PipeplanError(
            "timeline: pipelines that run side by side have no common iteration to draw; leave it "
            f"out, or use {ONE_OF_SYNCHRONOUS}"
        )


@contextmanager
def met(setup: Setup) -> Iterator[Client]:
    """The coordinator's client of this rank; inside, a coordinator runs that has the same work.

    Raises:
        PipeplanError: if the coordinator has another plan, or other options.
    """
    with _coordinator(setup), _client(setup) as client:
        _require_same_work(setup, client)
        yield client


@contextmanager
def _coordinator(setup: Setup) -> Iterator[None]:
    if not setup.assignment.hosts_coordinator:
        yield
        return
    # Torchrun ends all ranks when one ends, so silence is a matter of its timeout here.
    supervised = SupervisedCoordinator(
        setup.work, setup.assignment.meeting, setup.run.timeout_s, _end_all
    )
    try:
        yield
    finally:
        supervised.close()


def _end_all(why: str) -> None:
    """All ranks wait for the coordinator, this one's main thread too; torchrun ends the others."""
    try:
        print_error(why)
    finally:
        os._exit(1)


@contextmanager
def _client(setup: Setup) -> Iterator[Client]:
    own = setup.assignment
    client = Client(own.meeting, own.pipeline, own.place.rank, new_incarnation())
    try:
        yield client
    finally:
        client.close()


def _require_same_work(setup: Setup, client: Client) -> None:
    """Torchrun's own ranks have one command line."""
    if setup.assignment.part is not None:
        return
    theirs, mine = json.loads(client.store.get(ABOUT)), setup.work.facts()
    different = [name for name in mine if theirs.get(name) != mine[name]]
    if different:
        raise PipeplanError(
            f"coordinator at {setup.assignment.meeting}: it has {name} {theirs.get(name)}, here "
            f"it is {mine[name]}; start all with the same plan, --steps, --sync and --resume"
            for name in different
        )
