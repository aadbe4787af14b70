"""The settings of a run besides the training file, and what follows from both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from executor.emulation.pace import Pace
from executor.launch.config import TrainingConfig
from executor.launch.model import Factory
from executor.launch.rank_options import DEFAULT_TIMEOUT_S
from executor.training.batches import BatchOf
from executor.training.loss_scale import LossScale
from executor.training.master_weights import MakeOptimizer
from executor.training.optimizer import OptimizerFactory, job_optimizer, own_optimizer
from executor.training.samples import Dataset
from planner.plan.plan import Plan, Sync
from planner.sync.papers import announce_paper
from planner.sync.pipeline_replicas import pipeline_count
from planner.sync.strategies import parse_sync, require_fit
from planner.tracing.factory import Loss


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run besides the training file.

    Attributes:
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        loss: ``module:function`` or the function, if the plan's loss is the user's own.
        data: over the training file's: ``text``, ``random``, ``module:factory``, a map-style data
            set, or a function ``(step, microbatch) -> batch``.
        validation_data: over the training file's, as ``data``.
        optimizer: over the training file's: called with (name, parameter) pairs.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        backend: of torch.distributed; None takes what fits the device.
        resume: a checkpoint, or a folder of them, to go on from.
        timeout_s: a rank that lets others wait for so long counts as lost.
        sync: over the plan's: a strategy as ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``.
        pace: operations take the time that the plan's costs and it say; None: their own, or of an
            emulation what the plan says.
        pipeline: number of the pipeline that these processes are; None: they are all of them.
        coordinator: ``HOST:PORT`` of the one that tells pipelines shares and groups, if it runs
            already; needed with ``pipeline``.
        group_timeout_s: a pipeline that lets others of its group wait for so long is left out;
            None: 30 s.
        sync_trace: file for what was measured of the synchronisation.
        inject: faults on purpose, see :mod:`executor.elastic.faults`.
        check: whether the first rank compares the stages with eager autograd before they train.
    """

    model: str | Factory | None = None
    loss: str | Loss | None = None
    data: str | Dataset | BatchOf | None = None
    validation_data: str | Dataset | BatchOf | None = None
    optimizer: OptimizerFactory | None = None
    device: str | None = None
    backend: str | None = None
    resume: str | Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    sync: str | None = None
    pace: Pace | None = None
    pipeline: int | None = None
    coordinator: str | None = None
    group_timeout_s: float | None = None
    sync_trace: str | None = None
    inject: str = ""
    check: bool = False


def sync_of(plan: Plan, run: RunSettings) -> Sync:
    """The strategy of synchronisation: the run's, else the plan's.

    Raises:
        PipeplanError: naming an unknown strategy, every wrong option, or one that the plan's
            pipelines cannot have.
    """
    sync = plan.sync
    if run.sync is not None:
        sync = parse_sync(run.sync)
        announce_paper(run.sync)
    require_fit(sync, pipeline_count(plan))
    return sync


def autocast_of(config: TrainingConfig) -> torch.dtype | None:
    """Return the type that autocast lowers forwards to."""
    return None if config.autocast is None else getattr(torch, config.autocast)


def loss_scale_of(plan: Plan, config: TrainingConfig) -> LossScale | None:
    """The loss's scale at the beginning; None where gradients cannot overflow."""
    if plan.job.precision != "float16":
        return None
    return LossScale.start(config.loss_scale)


def optimizer_of(
    plan: Plan, config: TrainingConfig, factory: OptimizerFactory | None
) -> MakeOptimizer:
    """Return what makes the optimizer of parameters by name: the user's own, or the job's."""

    def make(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        arguments, rate = config.optimizer_arguments, config.learning_rate
        own = config.optimizer if factory is None else factory
        if own is None:
            return job_optimizer(plan.job, parameters, arguments, rate)
        return own_optimizer(own, parameters, arguments, rate)

    return make


@dataclass(frozen=True)
class PlanRank:
    """Return the number of this process."""

    rank: int
    world_size: int

    @staticmethod
    def of_this_process() -> PlanRank:
        """Take it from the process group if there is one, else from what torchrun sets."""
        if dist.is_initialized():
            return PlanRank(dist.get_rank(), dist.get_world_size())
        return PlanRank(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
