"""What a rank takes part with, made of its setup once the ranks of its pipeline have met."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from executor.checkpoint import Ranks
from executor.config import CheckpointTable
from executor.coordinator.client import Client
from executor.exchange.groups import Groups
from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import TensorServer
from executor.exchange.weights import Weights
from executor.pipelines.checkpoints import PipelineCheckpoints
from executor.pipelines.fault_notes import note_fault
from executor.pipelines.member import Member
from executor.pipelines.seat import own_address
from executor.pipelines.setup import Setup
from executor.pipelines.writing import Writing
from executor.run import autocast_of, loss_scale_of, optimizer_of
from executor.sync.between import between_of
from executor.trainer import Trainer


def trainer_of(setup: Setup) -> Trainer:
    """The pipeline alone, where it goes on from a checkpoint if there is one."""
    config, run = setup.config, setup.run
    trainer = Trainer(
        setup.prepared,
        setup.feed.batch_of,
        seed=config.seed,
        optimizer_of=optimizer_of(setup.plan, config, run.optimizer),
        clip_norm=config.clip_norm,
        factor=setup.steps.by_share(config.rate_factor()),
        loss_scale=loss_scale_of(setup.plan, config),
        autocast=autocast_of(config),
        timeout=timedelta(seconds=run.timeout_s),
        pace=None if run.pace is None else run.pace.of(setup.ranks),
    )
    if setup.checkpoint is not None:
        setup.saved.load(setup.checkpoint, trainer.optimisation)
    return trainer


def member_of(setup: Setup, trainer: Trainer, client: Client) -> Member:
    """This rank among those at its place of other pipelines, under the strategy."""
    timeout_s = setup.group_timeout_s
    host = own_address(setup.seat.meeting)
    store = setup.seat.meeting.connect()
    groups = Groups(store, client.pipeline, client.place, host, timeout_s)
    weights = Weights(trainer.optimisation, setup.saved.buffers)
    server = TensorServer(host)
    neighbours = Neighbours(client, groups, server, trainer.optimisation, weights, timeout_s)
    setup.faults.tell = partial(note_fault, store)
    between = between_of(setup.options, neighbours, setup.config.seed)
    return Member(trainer, neighbours, between, client, setup.faults)


def checkpoints_of(
    setup: Setup, trainer: Trainer, member: Member, client: Client
) -> PipelineCheckpoints:
    """Those of this pipeline, which are written when they are due and it is its turn."""
    writing = Writing(client.store, Ranks.of_process_group(), setup.seat.pipeline)

    def save(table: CheckpointTable, step: int, share: int) -> None:
        seen = setup.feed.samples_seen_after(share + 1)
        setup.saved.save(table.folder, step, trainer.optimisation, seen, table.keep)

    return PipelineCheckpoints(setup.config.checkpoint, setup.steps, member, writing, save)
