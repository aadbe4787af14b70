"""Preparation of one rank of decentralized training, before it meets the other pipelines."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.coordinator.client import Client
from executor.coordinator.server import ServerThread, Serving
from executor.coordinator.watch import tell_parent
from executor.coordinator.wire import Endpoint
from executor.coordinator.work import CoordinatorWork
from executor.distributed.process_group import (
    MEETING_TIMEOUT_S,
    device_of_this_process,
    require_backend,
)
from executor.elastic.faults import parse_faults
from executor.elastic.rank_assignment import (
    own_address,
    rank_assignment_of,
    torchrun_address,
    training_name,
)
from executor.elastic.trace import WholeSteps
from executor.emulation.emulation import emulating_trainer
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared, prepare
from executor.launch.rank_options import DEFAULT_GROUP_TIMEOUT_S, require_seconds
from executor.launch.run import RunSettings, autocast_of, loss_scale_of, optimizer_of
from executor.sync.averaging import local_optimizer
from executor.sync.shared_parameters import ParameterOwners
from executor.training.agreement import make_equal
from executor.training.beginning import Beginning
from executor.training.feed import Feed
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import Optimisation, StepOutcome
from executor.training.optimizer_check import require_divisible
from executor.training.rank_optimisation import optimisation_of
from executor.training.saved_state import SavedState
from executor.training.trainer import Trainer
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Plan, Sync
from planner.prediction import predict, replay
from planner.records.document import require_file_path
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS, PipelineReplica, pipeline_replicas_of
from planner.sync.strategies import options_of
from planner.verification import require_valid

Optimise = Callable[[int], StepOutcome]
"""The optimizer's part of a step."""


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
        emulates: whether operations only take their predicted time: there is no model and no data.

    Attributes:
        replicas: the pipelines of the plan.
        assignment: of this process.
        options: of the strategy.
        injected: faults on purpose, of all pipelines.
        device: of this process.
        part: plan of this pipeline alone.
        checkpoint: that the training goes on from, if any.
        steps: of the whole training.

    Raises:
        PipeplanError: if the plan cannot be run so.
    """

    def __init__(
        self, plan: Plan, config: TrainingConfig, run: RunSettings, *, emulates: bool = False
    ) -> None:
        require_valid(plan)
        _require_known(config)
        self.plan = plan
        self.config = config
        self.run = run
        self.emulates = emulates
        self.replicas = pipeline_replicas_of(plan)
        self.assignment = rank_assignment_of(plan, self.replicas, run.pipeline, run.coordinator)
        self.options = options_of(plan.sync)
        if run.group_timeout_s is not None:
            require_seconds(run.group_timeout_s, "group_timeout_s")
        self.injected = parse_faults(run.inject, len(self.replicas))
        if run.sync_trace is not None:
            require_file_path(run.sync_trace)
        self.device = torch.device("cpu") if emulates else device_of_this_process(run.device)
        require_backend(run.backend, self.device)
        self.part = pipeline_replica_plan(plan, self.replicas[self.assignment.pipeline])
        self.checkpoint: Checkpoint | None = None
        before = 0
        if not emulates:
            self.prepared = self._prepare()
            self.saved = SavedState(self.prepared, config)
            self.checkpoint = self._begins()
            before = self.saved.require_fits(self.checkpoint)
            self.feed = Feed(self.prepared, config, run.data, self.checkpoint, 1)
            if self.assignment.prints and self.assignment.pipeline == 0:
                self.feed.warn_if_nothing_is_drawn()
        self.steps = WholeSteps(before, len(self.replicas))

    def _begins(self) -> Checkpoint | None:
        """Return the checkpoint that the training, and so every pipeline of it, began from."""
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
            self.part,
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
        return CoordinatorWork.of_plan(
            self.plan, self.config.steps - self.steps.before, self.plan.sync
        )

    @property
    def share_size(self) -> int:
        """Microbatches of a work unit."""
        return len(self.replicas[self.assignment.pipeline].microbatches)

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """The function that makes the optimizer of parameters by name."""
        return optimizer_of(self.plan, self.config, self.run.optimizer)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Buffers of this rank's stages, by name."""
        return {} if self.emulates else self.saved.buffers

    def optimisation(self) -> Optimisation:
        """Return this rank's, where it goes on from a checkpoint if there is one."""
        make = local_optimizer(self.options, self.make_optimizer)
        if self.emulates:
            return Optimisation(self._zeros(), frozenset(), make)
        make_equal(self.prepared, resumes=self.checkpoint is not None)
        if self.run.optimizer is not None or self.config.optimizer is not None:
            own, saves = self.make_optimizer, self.config.checkpoint is not None
            strategy = self.plan.sync.strategy
            require_divisible(self.prepared, own, saves=saves, strategy=strategy)
        optimisation = optimisation_of(
            self.prepared,
            make,
            clip_norm=self.config.clip_norm,
            factor=self.steps.by_share(self.config.rate_factor()),
            loss_scale=loss_scale_of(self.plan, self.config),
            skip_non_finite=self.config.skip_non_finite,
        )
        if self.checkpoint is not None:
            self.saved.load(self.checkpoint, optimisation)
        return optimisation

    def trainer(self, optimisation: Optimisation, optimise: Optimise) -> Trainer:
        """Return what runs the pipeline's iterations.

        Args:
            optimisation: of this rank.
            optimise: the optimizer's part of a step, by its work unit from 1.
        """
        pace = None if self.run.pace is None else self.run.pace.of(self._ranks)
        options: dict[str, Any] = {"optimise": optimise}
        options["timeout"] = timedelta(seconds=self.run.timeout_s)
        if self.emulates:
            place = self.assignment.place
            return emulating_trainer(self.part, place, pace=pace, **options)
        return Trainer.of_model(
            self.prepared, self.feed.batch_of, optimisation=optimisation, pace=pace, **options
        )

    def _zeros(self) -> dict[str, nn.Parameter]:
        """Return parameters for those of this rank's stages, of as many bytes."""
        graph, held = self.part.model.graph, ParameterOwners.of_plan(self.part).ranks
        dtype, rank = getattr(torch, self.part.job.precision), self.assignment.place.rank
        mine = [p for p in graph.parameters if p.trainable and rank in held.get(p.name, ())]
        zeros = {p.name: torch.zeros(-(-p.bytes // dtype.itemsize), dtype=dtype) for p in mine}
        return {name: nn.Parameter(tensor) for name, tensor in zeros.items()}

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Ranks of this pipeline in the whole plan."""
        devices = self.replicas[self.assignment.pipeline].devices
        return tuple(self.plan.ranks.index(device) for device in devices)

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
def met(setup: Setup) -> Iterator[tuple[Client, Callable[[], Store]]]:
    """Meet the coordinator, which runs inside and hands out the same work.

    Yields the client, and what connects to the store where pipelines make process groups.

    Raises:
        PipeplanError: if the coordinator has another plan, or other options.
    """
    own = setup.assignment
    with _coordinator(setup) as endpoint:
        client = Client(endpoint, own.pipeline, own.place.rank)
        try:
            _require_same_work(setup, client)
            port = client.facts["store_port"]
            host, port = (endpoint.host, port) if port else torchrun_address()
            yield client, partial(_store, host, port, client.facts["token"])
        finally:
            client.close()


@contextmanager
def _coordinator(setup: Setup) -> Iterator[Endpoint]:
    own = setup.assignment
    if own.coordinator is not None:
        yield own.coordinator
        return
    address = Endpoint(*torchrun_address())
    store = _store(address.host, address.port, training_name())
    if not own.hosts_coordinator:
        yield Endpoint.parse(store.get("coordinator").decode())
        return
    host = own_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1024) as listener:
        endpoint = Endpoint(host, listener.getsockname()[1])
        serving = Serving(setup.work.facts(), setup.run.timeout_s)
        is_elsewhere = tell_parent(json.dumps(asdict(serving)), listener)
        server = None if is_elsewhere else ServerThread(listener, serving)
        store.set("coordinator", str(endpoint))
        yield endpoint
        if server is not None:
            # Other ranks may have yet to say goodbye.
            server.wait(serving.silent_s)


def _store(host: str, port: int, prefix: str) -> Store:
    timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"pipeplan/{prefix}", store)


def _require_same_work(setup: Setup, client: Client) -> None:
    """Refuse a coordinator of another training; torchrun's own ranks have one command line."""
    if setup.assignment.part is not None:
        return
    theirs, mine = client.facts["work"], setup.work.facts()
    different = [name for name in mine if theirs.get(name) != mine[name]]
    if different:
        raise PipeplanError(
            f"coordinator at {setup.assignment.coordinator}: it has {name} {theirs.get(name)}, "
            f"here it is {mine[name]}; start all with the same plan, --steps, --sync and --resume"
            for name in different
        )
