"""Asynchronous pipelines: they do not flush, and the optimizer steps after each microbatch.

PipeDream (Narayanan et al., SOSP 2019, section 3.3). With n stages, numbered from 0, stage s
computes microbatch t on weights that lack its last n - 1 - s updates: its staleness is its distance
from the last stage, for the forward and for the backward of a microbatch alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from executor.distributed.host_tuning import keep_freed_memory
from executor.emulation.pace import Pace, Pacer
from executor.launch.prepare import Prepared
from executor.runtime.continuous import StagePlace, Stretch, continuous_program
from executor.runtime.runtime import PipelineRuntime, Recorder, clock_of
from executor.runtime.transport import make_channels, open_communicators, transport_of
from executor.stage.runner import StageRunner
from executor.stage.stashing import StashingWorker
from executor.sync import Setting, make_strategy
from executor.training.agreement import BatchDigests
from executor.training.data import BatchOf, DeviceBatches
from executor.training.loop import Gathering
from executor.training.optimisation import Optimisation, StepOutcome
from planner.errors import PipeplanError
from planner.plan.programs import directions
from planner.sync.strategies import options_of


def lag_of(stages: int, microbatches: int) -> int:
    """Return how many steps ranks may be apart: waiting for their metrics must not flush."""
    return 1 + -(-stages // microbatches)


class AsynchronousTrainer:
    """This rank's stage of a pipeline that does not flush; the process group exists.

    A step is as many microbatches as the plan has, each of which trains by itself. The pipeline is
    empty at the beginning, and after steps whose weights are saved.

    Args:
        prepared: what this rank runs, one stage.
        batch_of: returns the batch of a step and microbatch.
        optimisation: of this rank's parameters.
        stretch_of: first and last step of the stretch between two moments at which the pipeline
            is empty, by a step in it.
        seed: of the training's random numbers.
        first_step: that will be run.
        autocast: what torch's autocast lowers operations to.
        timeout: of collectives.
        pace: operations take the time that the plan's costs and it say; None: their own.

    Attributes:
        optimisation: as it was given.
        members, process_groups: none, as no other rank holds the same parameters.
        worker: runs the stage.

    Raises:
        PipeplanError: if a stage writes running statistics.
    """

    def __init__(
        self,
        prepared: Prepared,
        batch_of: BatchOf,
        optimisation: Optimisation,
        stretch_of: Callable[[int], tuple[int, int]],
        *,
        seed: int = 0,
        first_step: int = 1,
        autocast: torch.dtype | None = None,
        timeout: timedelta | None = None,
        pace: Pace | None = None,
    ) -> None:
        if prepared.device.type == "cpu":
            keep_freed_memory()
        plan, device = prepared.plan, prepared.device
        (stage,) = prepared.stages
        self.optimisation = optimisation
        self.members = None
        self.process_groups: Mapping[tuple[int, ...], Any] = {}
        self._plan, self._device = plan, device
        self._stretch_of = stretch_of
        self._recorder = Recorder(clock_of(device))
        self._step, self._outcome = 0, StepOutcome(None, None, skipped=False)
        ranks = tuple(plan.ranks.index(s.devices[0]) for s in plan.stages)
        self._place = StagePlace(stage.index, ranks)
        runner = StageRunner(stage, 1, device=device, autocast=autocast)
        if runner.statistics is not None:
            raise PipeplanError(
                f"--pipelining async: stage {stage.index} writes running statistics (batch "
                "normalisation), whose order is that of whole steps; use --pipelining flush"
            )

        self._checked = BatchDigests(batch_of, plan.microbatches, first_step)

        def numbered(_: int, microbatch: int) -> Mapping[str, Tensor]:
            step, number = divmod(microbatch, plan.microbatches)
            return self._checked(step + 1, number)

        batches = DeviceBatches(numbered, stage.model_inputs, (), device, None)
        self.worker = StashingWorker(runner, batches, seed, plan.microbatches, self._update)
        ends = directions(plan)
        transport = transport_of(device, make_channels(ends, device, timeout))
        open_communicators(transport, ends, {}, device)
        self._pacer = None if pace is None else self._paced(prepared, pace)
        self._runtime = PipelineRuntime(
            {stage.index: self.worker},
            (),
            lambda reduce: None,
            transport,
            self._recorder,
            () if self._pacer is None else (self._pacer,),
            None if self._pacer is None else self._pacer.clock.waited,
        )

    def _paced(self, prepared: Prepared, pace: Pace) -> Pacer:
        setting = Setting(options_of(self._plan.sync), (), {}, self._recorder, self.optimisation)
        nobody = make_strategy(self._plan, setting)
        return Pacer.of_plan(self._plan, prepared.place.rank, pace, (), nobody)

    def iterate(self, step: int) -> Gathering:
        """Run this stage until the backwards of a step are done; ranks are apart by their depth."""
        plan = self._plan
        self._step = step
        self._recorder.begin()
        if self._pacer is not None:
            self._pacer.begin_iteration()
        first, last = self._stretch_of(step)
        count = plan.microbatches
        stretch = Stretch((first - 1) * count, last * count)
        program = continuous_program(self._place, stretch, (step - 1) * count, count)
        loss = self._runtime.run(program, empties=step == last) / count
        record = self._recorder.end()
        digests = self._checked.take(step)
        return Gathering(plan, step, record, loss, self._device, self._outcome, digests)

    def end_after(self, step: int) -> int:
        """Return the step after which training may end: the pipeline empties until then."""
        first, last = self._stretch_of(step)
        ahead = lag_of(len(self._plan.stages), self._plan.microbatches) - 1
        end = min(last, step + ahead)
        self._stretch_of = lambda _: (first, end)
        return end

    def _update(self) -> None:
        start = self._recorder.mark()
        self._outcome = self.optimisation.step(self._step)
        self._recorder.note("optimizer", None, start)

    def settle(self) -> None:
        """Nothing is under way after a step whose weights are read."""

    def close(self) -> None:
        """Nothing is under way."""
