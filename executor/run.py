"""How a plan is run, beside what the training file says, and what both make of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from executor.config import TrainingConfig
from executor.data import BatchOf
from executor.dataset import Dataset
from executor.limits import DEFAULT_TIMEOUT_S
from executor.loss_scale import LossScale
from executor.master_weights import MakeOptimizer
from executor.model import Factory
from executor.optimizer import OptimizerFactory, job_optimizer, own_optimizer
from executor.pace import Pace
from planner.artifacts.plan import Plan, Sync
from planner.sync.lanes import pipeline_count
from planner.sync.strategies import parse_sync, require_fit
from planner.tracing.factory import Loss


@dataclass(frozen=True)
class Run:
    """How a plan is run, beside what the training file says.

    Attributes:
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        loss: ``module:function`` or the function, if the plan's loss is the user's own.
        data: over the training file's: ``text``, ``random``, ``module:factory``, a map-style data
            set, or a function ``(step, microbatch) -> batch``.
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
        inject: faults on purpose, see :mod:`executor.faults`.
    """

    model: str | Factory | None = None
    loss: str | Loss | None = None
    data: str | Dataset | BatchOf | None = None
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


def sync_of(plan: Plan, run: Run) -> Sync:
    """The strategy of synchronisation: the run's, else the plan's.

    Raises:
        PipeplanError: naming an unknown strategy, every wrong option, or one that the plan's
            pipelines cannot have.
    """
    sync = plan.sync if run.sync is None else parse_sync(run.sync)
    require_fit(sync, pipeline_count(plan))
    return sync


def autocast_of(config: TrainingConfig) -> torch.dtype | None:
    """What forwards are lowered to."""
    return None if config.autocast is None else getattr(torch, config.autocast)


def loss_scale_of(plan: Plan, config: TrainingConfig) -> LossScale | None:
    """The loss's scale at the beginning; None where gradients cannot overflow."""
    if plan.job.precision != "float16":
        return None
    return LossScale.start(None if config.loss_scale is None else config.loss_scale.policy())


def optimizer_of(
    plan: Plan, config: TrainingConfig, factory: OptimizerFactory | None
) -> MakeOptimizer:
    """What makes the optimizer of parameters by name: one's own, or the job's."""

    def make(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        arguments, rate = config.optimizer_arguments, config.learning_rate
        own = config.optimizer if factory is None else factory
        if own is None:
            return job_optimizer(plan.job, parameters, arguments, rate)
        return own_optimizer(own, parameters, arguments, rate)

    return make
