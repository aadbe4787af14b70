"""Training from beginning to end: data, iterations, checkpoints, the measured timeline."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.distributed.machines import Machine, require_machines, warn_of_machines
from executor.distributed.process_group import (
    device_of_this_process,
    process_group,
    require_backend,
)
from executor.distributed.stop import NO_FOLDER, Stopped, StopRequest
from executor.elastic.run import PipelineRun
from executor.elastic.trace import SynchronousStepTimes
from executor.emulation.emulation import emulating_trainer
from executor.launch.config import TrainingConfig
from executor.launch.model import Factory
from executor.launch.prepare import prepare, require_runnable
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
from executor.training.batches import BatchOf
from executor.training.beginning import Beginning
from executor.training.feed import Feed, validation_feed
from executor.training.loop import Loop, Report, StepMetrics, StepObserver
from executor.training.optimisation import Optimisation
from executor.training.optimizer import OptimizerFactory
from executor.training.optimizer_check import require_divisible
from executor.training.rank_optimisation import optimisation_of
from executor.training.samples import Dataset
from executor.training.saved_state import SavedState, warn_of_schedule
from executor.training.trainer import Trainer
from executor.training.validation import Validation
from planner.errors import PipeplanError, shorten
from planner.plan.plan import Plan
from planner.prediction import with_strategy
from planner.records.document import require_file_path
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
        validation_data,
        optimizer,
        device,
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
    return _Training(plan, config, run).train(report)


class _Training:
    """This rank's part of a training whose ranks all run in step.

    Everything that one rank can refuse is refused when it is made, before the ranks meet.
    """

    def __init__(self, plan: Plan, config: TrainingConfig, run: RunSettings) -> None:
        self.plan, self.config, self.run = plan, config, run
        self.place = PlanRank.of_this_process()
        self.beginning = Beginning(config, run, self.place.rank)
        device = device_of_this_process(run.device)
        require_backend(run.backend, device)
        self.prepared = prepare(
            plan,
            run.model,
            loss=run.loss,
            seed=config.seed,
            device=device,
            autocast=autocast_of(config),
            place=self.place,
            evaluates=config.validation is not None,
            check=run.check,
        )
        self.saved = SavedState(self.prepared, config)
        self.settings: dict[str, Any] = {
            "clip_norm": config.clip_norm,
            "factor": config.rate_factor(),
            "loss_scale": loss_scale_of(plan, config),
            "skip_non_finite": config.skip_non_finite,
        }
        self._begin_after(self.beginning.checkpoint)
        if self.place.rank == 0:
            self.feed.warn_if_nothing_is_drawn()

    def _begin_after(self, checkpoint: Checkpoint | None) -> None:
        """Begin after a checkpoint, or at step 1."""
        self.checkpoint = checkpoint
        self.first_step = self.saved.require_fits(checkpoint) + 1
        data = self.run.data
        self.feed = Feed(self.prepared, self.config, data, checkpoint, self.first_step)

    def train(self, report: Report | None) -> list[StepMetrics]:
        """Train to the end, or until a signal asks all ranks to stop.

        Raises:
            Stopped: once a signal has.
        """
        config, run, table = self.config, self.run, self.config.checkpoint
        stop = StopRequest(None if table is None else table.grace_s)
        device = self.prepared.device
        with process_group(device, run.timeout_s, run.backend, stop=stop) as machines:
            self._agree(machines)
            trainer = self._trainer(self._optimisation())
            self.beginning.tell(config.steps)
            observers = _observers(self.plan, self.place, device, run, config.timeline)
            late = int(device.type == "cuda")
            loop = Loop(report, observers, lag=_lag(self.plan), late=late, stop=stop)
            history = loop.run(
                trainer,
                range(self.first_step, config.steps + 1),
                partial(self._save, loop, trainer),
                self._validation(trainer),
                first=self.first_step,
            )
            trainer.close()
        if loop.end is not None and loop.end < config.steps:
            told = NO_FOLDER if table is None else f"resume with --resume {table.folder}"
            name = signal.Signals(stop.agreed).name
            raise Stopped(stop.agreed, f"stopped by {name} after step {loop.end}: {told}")
        return history

    def _agree(self, machines: Sequence[Machine]) -> None:
        """Check what no rank can check alone; all call it.

        Batches that several ranks read are compared later, in steps of their own.
        """
        require_machines(self.plan, machines)
        if self.place.rank == 0:
            warn_of_machines(self.plan, machines)
        agreed = self.beginning.agreed(Ranks.of_process_group(), self.saved.require_fits)
        if agreed is not self.checkpoint:
            self._begin_after(agreed)
        make_equal(self.prepared, resumes=self.checkpoint is not None)

    def _optimisation(self) -> Optimisation:
        """Return the optimisation of this rank's parameters, where a checkpoint left it."""
        config = self.config
        make = optimizer_of(self.plan, config, self.run.optimizer)
        if self.run.optimizer is not None or config.optimizer is not None:
            require_divisible(self.prepared, make, saves=config.checkpoint is not None)
        optimisation = optimisation_of(self.prepared, make, **self.settings)
        if self.checkpoint is not None:
            self.saved.load(self.checkpoint, optimisation)
            if self.place.rank == 0:
                warn_of_schedule(self.checkpoint, config)
        return optimisation

    def _trainer(self, optimisation: Optimisation) -> Trainer:
        """Return what runs this rank's iterations."""
        return Trainer.of_model(
            self.prepared,
            self.feed.batch_of,
            first_step=self.first_step,
            optimisation=optimisation,
            over_tokens=self.config.loss_mean == "tokens",
            timeout=timedelta(seconds=self.run.timeout_s),
            watch=self.config.timeline is not None,
            pace=self.run.pace,
        )

    def _validation(self, trainer: Trainer) -> Callable[[int], float | None]:
        """Return what validates after a step that is to have a validation."""
        table, steps = self.config.validation, self.config.steps
        if table is None:
            return lambda step: None
        batch_of, count = validation_feed(self.prepared, self.config, self.run.validation_data)
        over_tokens = self.config.loss_mean == "tokens"
        validation = Validation(
            self.prepared, trainer.connections, batch_of, count, over_tokens=over_tokens
        )

        def validate(step: int) -> float | None:
            if step % table.every and step != steps:
                return None
            trainer.settle()
            return validation.loss()

        return validate

    def _save(self, loop: Loop, trainer: Trainer, step: int) -> None:
        """Write a checkpoint after a step that is to have one."""
        table = self.config.checkpoint
        if table is None or (step % table.every and step not in (self.config.steps, loop.end)):
            return
        loop.catch_up()
        trainer.settle()
        self.saved.save(
            table.folder,
            step,
            trainer.optimisation,
            self.feed.samples_seen_after(step),
            table.keep,
            self.feed.state_after(step, Ranks.of_process_group()),
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
    require_possible(plan, run, None)
    if plan.sync.strategy not in SYNCHRONOUS:
        config = TrainingConfig(steps=steps, timeline=timeline)
        return PipelineRun(plan, config, run, emulates=True).train(report)
    require_strategy(plan)
    place = PlanRank.of_this_process()
    require_runnable(plan, place.world_size)
    if timeline is not None:
        require_file_path(timeline)
    device, limit = torch.device("cpu"), timedelta(seconds=run.timeout_s)
    with process_group(device, run.timeout_s) as machines:
        require_machines(plan, machines)
        trainer = emulating_trainer(plan, place, timeout=limit, watch=bool(timeline), pace=run.pace)
        observers = _observers(plan, place, device, run, timeline, emulated=True)
        history = Loop(report, observers, lag=_lag(plan)).run(trainer, range(1, steps + 1))
        trainer.close()
        return history


def _observers(
    plan: Plan,
    place: PlanRank,
    device: torch.device,
    run: RunSettings,
    timeline: str | None,
    *,
    emulated: bool = False,
) -> list[StepObserver]:
    """Return what writes the timeline and the trace of synchronisation, where they are wanted."""
    found: list[StepObserver] = []
    if timeline is not None:
        found.append(TimelineWriter(plan, place.rank, device, timeline, emulated=emulated))
    if run.sync_trace is not None:
        found.append(SynchronousStepTimes(plan, place.rank, run.sync_trace))
    return found


def _lag(plan: Plan) -> int:
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
