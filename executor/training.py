"""Training from beginning to end: data, iterations, checkpoints, the measured timeline."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor.checkpoint import Checkpoint
from executor.config import TrainingConfig
from executor.data import BatchOf
from executor.dataset import Dataset
from executor.emulation import Emulator
from executor.feed import Feed
from executor.learning_rate import Factor
from executor.limits import DEFAULT_TIMEOUT_S, require_timeout
from executor.loop import Loop, Report
from executor.metrics import StepMetrics
from executor.model import Factory
from executor.optimizer import OptimizerFactory
from executor.pipelines.run import PipelineRun
from executor.place import Place
from executor.prepare import Prepared, prepare, require_runnable
from executor.process_group import device_of_this_process, process_group, require_backend
from executor.requirements import require_effect, require_fitting, require_writable
from executor.run import Run, autocast_of, loss_scale_of, optimizer_of, sync_of
from executor.saved_state import SavedState
from executor.sync import require_strategy
from executor.trainer import Trainer
from planner.artifacts.document import require_file_path
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError, shorten
from planner.sync.lanes import IN_STEP
from planner.sync.strategies import TOGETHER
from planner.tracing.factory import Loss


def train(
    plan: Plan,
    model: str | Factory | None = None,
    data: str | Dataset | BatchOf | None = None,
    *,
    loss: str | Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    device: str | None = None,
    resume: str | Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sync: str | None = None,
    config: TrainingConfig | None = None,
    report: Report | None = None,
    **settings: Any,
) -> list[StepMetrics]:
    """Train by a plan in the processes that torchrun started.

    Args:
        plan: what to run; one rank a device of ``plan.ranks``.
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        data: ``text``, ``random``, ``module:factory``, a map-style data set, or a function
            ``(step, microbatch) -> batch``.
        loss: ``module:function`` or the function, if the plan's loss is the user's own.
        optimizer: called with (name, parameter) pairs of this rank, as ``torch.optim.AdamW`` can
            be, and with ``optimizer_arguments``; default the plan's.
        device: ``cpu`` or ``cuda``; default a GPU if there is one.
        resume: a checkpoint, or a folder of them, to go on from.
        timeout_s: a rank that lets others wait for so long counts as lost.
        sync: strategy of synchronisation over the plan's, such as ``decoupled`` or
            ``all_reduce:bucket_mib=10``.
        config: a training file's contents; default made of ``settings``.
        report: called on every rank after every iteration.
        **settings: fields of :class:`~executor.config.TrainingConfig`, such as ``steps=100``,
            ``clip_norm=1.0`` or ``checkpoint={"folder": "checkpoints", "every": 10}``.

    Returns:
        The metrics of every iteration, the same on all ranks.

    Raises:
        PipeplanError: if the plan cannot be run so; before any process group is made where one
            rank can tell.
    """
    if config is not None and settings:
        raise PipeplanError(
            f"config and {', '.join(sorted(settings))} are given; put all into one of them"
        )
    config = config or TrainingConfig.parse(settings, "train()")
    run = Run(model, loss, data, optimizer, device, resume=resume, timeout_s=timeout_s, sync=sync)
    return run_training(plan, config, run, report)


def run_training(
    plan: Plan, config: TrainingConfig, run: Run, report: Report | None = None
) -> list[StepMetrics]:
    """Train as :func:`train` does."""
    plan = _planned(plan, run)
    _require_possible(plan, config, run)
    if plan.sync.strategy not in TOGETHER:
        return PipelineRun(plan, config, run).train(report)
    require_strategy(plan)
    place = Place.of_this_process()
    checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
    prepared = _prepared(plan, config, run, place)
    saved = SavedState(prepared, config.seed)
    first_step = 1 if checkpoint is None else saved.require_fits(checkpoint) + 1
    feed = Feed(prepared, config, run.data, checkpoint, first_step)
    if place.rank == 0:
        feed.tell_if_nothing_is_drawn()
    factor = config.rate_factor()
    with process_group(prepared.device, run.timeout_s, run.backend):
        trainer = _trainer(prepared, feed, config, run, factor)
        if checkpoint is not None:
            saved.load(checkpoint, trainer.optimisation)
        loop = Loop(
            plan, place, prepared.device, config.timeline, run.sync_trace, report, emulated=False
        )
        save = partial(_save, trainer, saved, feed, config)
        history = loop.run(trainer, range(first_step, config.steps + 1), save)
        trainer.close()
        return history


def _require_possible(plan: Plan, config: TrainingConfig, run: Run) -> None:
    """What any rank can refuse by itself, before the model is built."""
    require_effect(plan, run)
    require_timeout(run.timeout_s)
    if run.pace is not None:
        run.pace.require_ranks(len(plan.ranks))
    require_fitting(plan, config)
    require_writable(config)


def _prepared(plan: Plan, config: TrainingConfig, run: Run, place: Place) -> Prepared:
    """This rank's part of the plan."""
    device = device_of_this_process(run.device)
    require_backend(run.backend, device)
    return prepare(
        plan,
        run.model,
        loss=run.loss,
        seed=config.seed,
        device=device,
        autocast=autocast_of(config),
        place=place,
    )


def _trainer(
    prepared: Prepared, feed: Feed, config: TrainingConfig, run: Run, factor: Factor
) -> Trainer:
    """This rank's trainer; all ranks make theirs together."""
    return Trainer(
        prepared,
        feed.batch_of,
        seed=config.seed,
        optimizer_of=optimizer_of(prepared.plan, config, run.optimizer),
        clip_norm=config.clip_norm,
        factor=factor,
        loss_scale=loss_scale_of(prepared.plan, config),
        autocast=autocast_of(config),
        timeout=timedelta(seconds=run.timeout_s),
        watch=config.timeline is not None,
        pace=run.pace,
    )


def _save(
    trainer: Trainer, saved: SavedState, feed: Feed, config: TrainingConfig, step: int
) -> None:
    """Write a checkpoint after a step that is to have one."""
    table = config.checkpoint
    if table is not None and (step % table.every == 0 or step == config.steps):
        trainer.settle()
        seen = feed.samples_seen_after(step)
        saved.save(table.folder, step, trainer.optimisation, seen, table.keep)


def run_emulation(
    plan: Plan, steps: int, run: Run, timeline: str | None = None, report: Report | None = None
) -> list[StepMetrics]:
    """Run a plan whose operations only take their predicted time, with real messages.

    No model is built and nothing is computed: a plan of any graph can be emulated.

    Args:
        plan: what to run.
        steps: iterations.
        run: its ``timeout_s``, ``sync`` and ``pace`` count.
        timeline: file for what really happened.
        report: called on every rank after every iteration.
    """
    plan = _planned(plan, run)
    if plan.sync.strategy not in TOGETHER:
        raise PipeplanError(
            f"--emulate with sync.strategy {plan.sync.strategy!r}: it emulates ranks in step only; "
            "use --emulate-speed in its place, which computes and then waits, or --sync with "
            f"{IN_STEP}"
        )
    require_effect(plan, run)
    require_strategy(plan)
    place = Place.of_this_process()
    if run.pace is not None:
        run.pace.require_ranks(len(plan.ranks))
    require_runnable(plan, place.world_size)
    if timeline is not None:
        require_file_path(timeline)
    device = torch.device("cpu")
    with process_group(device, run.timeout_s):
        emulator = Emulator(
            plan,
            place,
            timedelta(seconds=run.timeout_s),
            watch=timeline is not None,
            pace=run.pace,
        )
        loop = Loop(plan, place, device, timeline, run.sync_trace, report, emulated=True)
        history = loop.run(emulator, range(1, steps + 1), lambda step: None)
        emulator.close()
        return history


def _planned(plan: object, run: Run) -> Plan:
    """The plan, with what the run says over it."""
    if not isinstance(plan, Plan):
        raise PipeplanError(
            f"plan: {shorten(plan)} is of type {type(plan).__name__}, no plan; load one "
            "with Plan.load(path)"
        )
    return plan.model_copy(update={"sync": sync_of(plan, run)})
