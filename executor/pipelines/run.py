"""Training by a plan whose pipelines run side by side, from beginning to end."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.config import TrainingConfig
from executor.coordinator.client import Client
from executor.coordinator.line import NothingLeftError
from executor.coordinator.report import report_lines
from executor.coordinator.store import ENDED, REPORT
from executor.coordinator.supervised import Work
from executor.faults import Fault
from executor.metrics import StepMetrics
from executor.pipelines.fault_notes import missed_faults
from executor.pipelines.lines import begin_line, end_lines, missed_lines
from executor.pipelines.meeting import met
from executor.pipelines.member import Member
from executor.pipelines.parts import checkpoints_of, member_of, trainer_of
from executor.pipelines.setup import Setup
from executor.pipelines.trace import save_trace
from executor.process_group import process_group
from executor.run import Run
from executor.trainer import Trainer
from planner.artifacts.plan import Plan

Report = Callable[[StepMetrics], None]
logger = logging.getLogger(__name__)


class PipelineRun:
    """This rank's part of a training whose pipelines run side by side.

    Args:
        plan: with all pipelines, and the strategy.
        config: of the training.
        run: how it is run.

    Raises:
        PipeplanError: if the plan cannot be run so; before any process group is made where one
            rank can tell.
    """

    def __init__(self, plan: Plan, config: TrainingConfig, run: Run) -> None:
        self._setup = Setup(plan, config, run)

    @property
    def work(self) -> Work:
        """What the coordinator hands out."""
        return self._setup.work

    def train(self, report: Report | None = None) -> list[StepMetrics]:
        """Take part until all shares are done.

        Args:
            report: called after every step of this pipeline, by all its ranks.

        Returns:
            The metrics of this pipeline's steps.
        """
        setup, run, seat = self._setup, self._setup.run, self._setup.seat
        tells = report is not None and seat.tells
        with process_group(setup.device, run.timeout_s, run.backend, seat.part):
            trainer = trainer_of(setup)
            with met(setup) as client:
                if tells:
                    logger.info("%s", begin_line(self.work, seat.pipeline, setup.share_size))
                begun_s = time.monotonic()
                history = self._take_part(trainer, client, report)
                found: dict[str, Any] = json.loads(client.store.get(REPORT))
                took_s = time.monotonic() - begun_s
                missed = missed_faults(client.store, setup.injected, seat)
                client.store.add(ENDED, 1)
            if tells:
                for line in self._last_lines(found, missed, history, took_s):
                    logger.info("%s", line)
        return history

    def _last_lines(
        self,
        found: dict[str, Any],
        missed: Sequence[Fault],
        history: Sequence[StepMetrics],
        took_s: float,
    ) -> Iterator[str]:
        seat = self._setup.seat
        if seat.hosts_coordinator:
            yield from report_lines(found)
        yield from missed_lines(missed)
        yield from end_lines(found, seat, history, took_s)

    def _take_part(
        self, trainer: Trainer, client: Client, report: Report | None
    ) -> list[StepMetrics]:
        with closing(member_of(self._setup, trainer, client)) as member:
            return self._train_as(member, trainer, client, report)

    def _train_as(
        self, member: Member, trainer: Trainer, client: Client, report: Report | None
    ) -> list[StepMetrics]:
        setup = self._setup
        checkpoints = checkpoints_of(setup, trainer, member, client)
        history: list[StepMetrics] = []

        def after(share: int, metrics: StepMetrics) -> None:
            history.append(replace(metrics, step=len(history) + 1))
            if report is not None:
                report(history[-1])
            checkpoints.after(share)

        try:
            member.run(after)
        except NothingLeftError as error:
            if not error.is_done:
                raise
            return history
        checkpoints.at_end(self.work.shares - 1, setup.run.timeout_s)
        self._trace(member, client)
        return history

    def _trace(self, member: Member, client: Client) -> None:
        """The rank that hosts the coordinator, or the very first, gathers all ranks' times."""
        setup, work = self._setup, self.work
        path, seat = setup.run.sync_trace, setup.seat
        if path is None:
            return
        bytes_ = sum(flat.numel() * flat.element_size() for flat in member.weights.flat)
        member.times.publish(client.store, bytes_)
        if seat.hosts_coordinator or (seat.tells and seat.pipeline == 0):
            sizes = work.pipelines, work.places, work.pipelines_per_node
            save_trace(Path(path), client.store, work.sync, *sizes)
