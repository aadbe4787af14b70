"""Training from beginning to end: data, iterations, checkpoints, the measured timeline."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from executor.checkpoint.ranks import Ranks
from executor.distributed.machines import require_machines, warn_of_machines
from executor.distributed.process_group import (
    device_of_this_process,
    process_group,
    require_backend,
)
from executor.distributed.stop import NO_FOLDER, Stopped, StopRequest
from executor.elastic.run import PipelineRun
from executor.elastic.trace import SynchronousStepTimes
from executor.emulation.emulation import emulating_trainer
from executor.launch.config import CheckpointTable, TrainingConfig
from executor.launch.model import Factory
from executor.launch.prepare import Prepared, prepare, require_runnable
from executor.launch.rank_options import DEFAULT_TIMEOUT_S
from executor.launch.refusals import require_possible
from executor.launch.run import (
    PlanRank,
    RunSettings,
    autocast_of,
    loss_scale_of,
    optimizer_of,
    sync_of,
)
from executor.runtime.timeline import TimelineWriter
from executor.sync import require_strategy
from executor.training.agreement import make_equal
from executor.training.beginning import Beginning
from executor.training.data import BatchOf
from executor.training.dataset import Dataset
from executor.training.feed import Feed, validation_feed
from executor.training.loop import Loop, Report, StepMetrics, StepObserver
from executor.training.optimisation import Optimisation
from executor.training.optimizer import OptimizerFactory
from executor.training.optimizer_check import require_divisible
from executor.training.saved_state import SavedState, warn_of_schedule
from executor.training.trainer import Trainer, optimisation_of
from planner.errors import PipeplanError, shorten
from planner.plan.plan import Plan
from planner.prediction import with_strategy
from planner.records.document import require_file_path
from planner.sync.pipeline_replicas import ONE_OF_SYNCHRONOUS
from planner.sync.strategies import STALE, SYNCHRONOUS
from planner.tracing.factory import Loss

logger = logging.getLogger(__name__)


def train(
    plan: Plan,
    model: str | Factory | None = None,
    data: str | Dataset | BatchOf | None = None,
    *,
    loss: str | Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    validation_data: str | Dataset | BatchOf | None = None,
    device: str | None = None,
    resume: str | Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sync: str | None = None,
    check: bool = True,
    config: TrainingConfig | None = None,
    report: Report | None = None,
    **settings: Any,
) -> list[StepMetrics]:
    """Train by a plan in the processes that torchrun started.

    Args:
        plan: what to run; one rank a device of ``plan.rank_devices``.
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        data: ``text``, ``random``, ``module:factory``, a map-style or iterable data set, a
            generator function, or a function ``(step, microbatch) -> batch``.
        loss: ``module:function`` or the function, if the plan's loss is the user's own.
        optimizer: called with (name, parameter) pairs of this rank, as ``torch.optim.AdamW`` can
            be, and with ``optimizer_arguments``; default the plan's.
        validation_data: as ``data``, for ``validation={"every": 100}``.
        device: ``cpu`` or ``cuda``; default a GPU if there is one.
        resume: a checkpoint, or a folder of them, to go on from.
        timeout_s: a rank that lets others wait for so long counts as lost.
        sync: strategy of synchronisation over the plan's, such as ``decoupled`` or
            ``all_reduce:bucket_mib=10``.
        check: whether the first rank compares two small steps with eager autograd first.
        config: a training file's contents; default made of ``settings``.
        report: called on every rank after every iteration.
        **settings: fields of :class:`~executor.launch.config.TrainingConfig`, such as
        ``steps=100``,
            ``clip_norm=1.0`` or ``checkpoint={"folder": "checkpoints", "every": 10}``.

    Returns:
        The metrics of every iteration, the same on all ranks.

    Raises:
        PipeplanError: if the plan cannot be run so; before any process group is made where one
            rank can tell.
        Stopped: a ``SystemExit``, once SIGTERM or SIGINT has ended the training after a step.
    """
    if config is not None and settings:
        raise PipeplanError(
            f"config and {', '.join(sorted(settings))} are given; put all into one of them"
        )
    config = config or TrainingConfig.parse(settings, "train()")
    run = RunSettings(
        model,
        loss,
        data,
        optimizer=optimizer,
        validation_data=validation_data,
        device=device,
        resume=resume,
        timeout_s=timeout_s,
        sync=sync,
        check=check,
    )
    return run_training(plan, config, run, report)


def run_training(
    plan: Plan, config: TrainingConfig, run: RunSettings, report: Report | None = None
) -> list[StepMetrics]:
    """Train as :func:`train` does."""
    plan = _planned(plan, run)
    require_possible(plan, run, config)
    if plan.sync.strategy not in SYNCHRONOUS:
        return PipelineRun(plan, config, run).train(report)
    require_strategy(plan)
    place = PlanRank.of_this_process()
    beginning = Beginning(config, run, place.rank)
    prepared = _prepared(plan, config, run, place)
    saved = SavedState(prepared, config)
    checkpoint = beginning.checkpoint
    first_step = saved.require_fits(checkpoint) + 1
    feed = Feed(prepared, config, run.data, checkpoint, first_step)
    if place.rank == 0:
        feed.warn_if_nothing_is_drawn()
    settings = {
        "clip_norm": config.clip_norm,
        "factor": config.rate_factor(),
        "loss_scale": loss_scale_of(plan, config),
        "skip_non_finite": config.skip_non_finite,
    }
    table = config.checkpoint
    stop = StopRequest(None if table is None else table.grace_s)
    meeting = process_group(prepared.device, run.timeout_s, run.backend, stop=stop)
    with meeting as machines:
        require_machines(plan, machines)
        if place.rank == 0:
            warn_of_machines(plan, machines)
        here, ranks = checkpoint, Ranks.of_process_group()
        checkpoint = beginning.agreed(ranks, saved.require_fits)
        if checkpoint is not here:
            first_step = saved.require_fits(checkpoint) + 1
            feed = Feed(prepared, config, run.data, checkpoint, first_step)
        make_equal(prepared, resumes=checkpoint is not None)
        make_optimizer = optimizer_of(plan, config, run.optimizer)
        if run.optimizer is not None or config.optimizer is not None:
            require_divisible(prepared, make_optimizer, saves=config.checkpoint is not None)
        optimisation = optimisation_of(prepared, make_optimizer, **settings)
        if checkpoint is not None:
            saved.load(checkpoint, optimisation)
            if place.rank == 0:
                warn_of_schedule(checkpoint, config)
        beginning.tell(config.steps)
        trainer = _trainer(prepared, config, run, feed, optimisation, first_step)
        observers = _observers(plan, place, prepared.device, run, config.timeline, emulated=False)
        lag = _lag(plan, run)
        validate = _validation(prepared, config, run, trainer)
        late = int(prepared.device.type == "cuda")
        loop = Loop(report, observers, lag=lag, late=late, stop=stop)
        save = partial(_save, loop, trainer, saved, feed, config)
        steps = range(first_step, config.steps + 1)
        history = loop.run(trainer, steps, save, validate, first=first_step)
        trainer.close()
    if loop.end is not None and loop.end < config.steps:
        _stop(stop, loop.end, table)
    return history


def _stop(stop: StopRequest, step: int, table: CheckpointTable | None) -> NoReturn:
    """End a training that a signal has asked to stop.

    Raises:
        Stopped: always.
    """
    told = NO_FOLDER if table is None else f"resume with --resume {table.folder}"
    name = signal.Signals(stop.agreed).name
    raise Stopped(stop.agreed, f"stopped by {name} after step {step}: {told}")


def _prepared(plan: Plan, config: TrainingConfig, run: RunSettings, place: PlanRank) -> Prepared:
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
        evaluates=config.validation is not None,
        check=run.check,
    )


def _trainer(
    prepared: Prepared,
    config: TrainingConfig,
    run: RunSettings,
    feed: Feed,
    optimisation: Optimisation,
    first_step: int,
) -> Trainer:
    """Return what runs this rank's iterations."""
    return Trainer.of_model(
        prepared,
        feed.batch_of,
        first_step=first_step,
        optimisation=optimisation,
        timeout=timedelta(seconds=run.timeout_s),
        watch=config.timeline is not None,
        pace=run.pace,
        over_tokens=config.loss_mean == "tokens",
    )


def _validation(
    prepared: Prepared,
    config: TrainingConfig,
    run: RunSettings,
    trainer: Trainer,
) -> Callable[[int], float | None]:
    """Return what validates after a step that is to have a validation."""
    table = config.validation
    if table is None:
        return lambda step: None
    batch_of, count = validation_feed(prepared, config, run.validation_data)
    validation = trainer.validation(batch_of, count, over_tokens=config.loss_mean == "tokens")

    def validate(step: int) -> float | None:
        if step % table.every and step != config.steps:
            return None
        trainer.settle()
        return validation.loss()

    return validate


def _save(
    loop: Loop,
    trainer: Trainer,
    saved: SavedState,
    feed: Feed,
    config: TrainingConfig,
    step: int,
) -> None:
    """Write a checkpoint after a step that is to have one."""
    table = config.checkpoint
    if table is not None and (step % table.every == 0 or step in (config.steps, loop.end)):
        loop.catch_up()
        trainer.settle()
        seen = feed.samples_seen_after(step)
        saved.save(
            table.folder,
            step,
            trainer.optimisation,
            seen,
            table.keep,
            trainer.members,
            trainer.process_groups,
            feed.state_after(step, Ranks.of_process_group()),
        )


def run_emulation(
    plan: Plan,
    steps: int,
    run: RunSettings,
    timeline: str | None = None,
    report: Report | None = None,
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
    if plan.sync.strategy not in SYNCHRONOUS:
        raise PipeplanError(
            f"--emulate with sync.strategy {plan.sync.strategy!r}: it emulates ranks in step only; "
            "use --emulate-speed in its place, which computes and then waits, or --sync with "
            f"{ONE_OF_SYNCHRONOUS}"
        )
    require_possible(plan, run, None)
    require_strategy(plan)
    place = PlanRank.of_this_process()
    require_runnable(plan, place.world_size)
    if timeline is not None:
        require_file_path(timeline)
    device = torch.device("cpu")
    with process_group(device, run.timeout_s) as machines:
        require_machines(plan, machines)
        trainer = emulating_trainer(
            plan,
            place,
            timedelta(seconds=run.timeout_s),
            watch=timeline is not None,
            pace=run.pace,
        )
        observers = _observers(plan, place, device, run, timeline, emulated=True)
        loop = Loop(report, observers, lag=_lag(plan, run))
        history = loop.run(trainer, range(1, steps + 1))
        trainer.close()
        return history


def _observers(
    plan: Plan,
    place: PlanRank,
    device: torch.device,
    run: RunSettings,
    timeline: str | None,
    *,
    emulated: bool,
) -> list[StepObserver]:
    """Return what writes the timeline and the trace of synchronisation, where they are wanted."""
    found: list[StepObserver] = []
    if timeline is not None:
        found.append(TimelineWriter(plan, place.rank, device, timeline, emulated=emulated))
    if run.sync_trace is not None:
        found.append(SynchronousStepTimes(plan, place.rank, run.sync_trace))
    return found


def _lag(plan: Plan, run: RunSettings) -> int:
    """Return how many iterations ranks may be apart, which waiting for metrics would undo."""
    return int(plan.sync.strategy in STALE)


def _planned(plan: object, run: RunSettings) -> Plan:
    """The plan, with what the run says over it."""
    if not isinstance(plan, Plan):
        raise PipeplanError(
            f"plan: {shorten(plan)} is of type {type(plan).__name__}, no plan; load one "
            "with Plan.load(path)"
        )
    sync = sync_of(plan, run)
    # What a plan predicts depends on its strategy.
    return plan if sync == plan.sync else with_strategy(plan, sync)
