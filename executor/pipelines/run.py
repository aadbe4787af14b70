"""Training by a plan whose pipelines run side by side, from beginning to end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from executor.checkpoint import Checkpoint
from executor.config import TrainingConfig
from executor.coordinator.client import Client
from executor.coordinator.line import NothingLeftError
from executor.coordinator.report import report_lines
from executor.coordinator.store import ABOUT, ENDED, REPORT
from executor.coordinator.supervised import SupervisedCoordinator, Work, work_of
from executor.exchange.groups import Groups
from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import TensorServer
from executor.exchange.weights import Weights
from executor.faults import Faults, parse_faults
from executor.feed import Feed
from executor.learning_rate import Factor
from executor.metrics import StepMetrics
from executor.pipelines.member import Member
from executor.pipelines.seat import Seat, new_nonce, own_address, seat_of
from executor.pipelines.trace import save_trace
from executor.prepare import prepare
from executor.process_group import device_of_this_process, process_group, require_backend
from executor.run import Run, autocast_of, loss_scale_of, optimizer_of
from executor.saved_state import SavedState
from executor.sync.between import between_of
from executor.trainer import Trainer
from planner.artifacts.document import require_file_path
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.lane_plan import lane_plan
from planner.sync.lanes import lanes_of
from planner.sync.strategies import options_of
from planner.verifier import require_valid

Report = Callable[[StepMetrics], None]


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
        require_valid(plan)
        _require_known(config)
        self.plan = plan
        self.config = config
        self.run_ = run
        self.sync = plan.sync
        self.lanes = lanes_of(plan)
        self.seat: Seat = seat_of(plan, self.lanes, run.pipeline, run.coordinator)
        self.options = options_of(plan.sync)
        self.faults = Faults(parse_faults(run.inject), self.seat.pipeline)
        if run.sync_trace is not None:
            require_file_path(run.sync_trace)
        checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
        self.device = device_of_this_process(run.device)
        require_backend(run.backend, self.device)
        self.prepared = prepare(
            lane_plan(plan, self.lanes[self.seat.pipeline]),
            run.model,
            loss=run.loss,
            seed=config.seed,
            device=self.device,
            autocast=autocast_of(config),
            place=self.seat.place,
        )
        self.saved = SavedState(self.prepared, config.seed)
        self.checkpoint = checkpoint
        self.steps_before = 0 if checkpoint is None else self.saved.require_fits(checkpoint)
        self.feed = Feed(self.prepared, config, run.data, checkpoint, 1)
        self._saved_step = self.steps_before

    @property
    def work(self) -> Work:
        """What the coordinator hands out."""
        return work_of(self.plan, self.config.steps - self.steps_before, self.sync)

    def train(self, report: Report | None = None) -> list[StepMetrics]:
        """Take part until all shares are done.

        Args:
            report: called after every step of this pipeline, by all its ranks.

        Returns:
            The metrics of this pipeline's steps.
        """
        run = self.run_
        with process_group(self.device, run.timeout_s, run.backend, self.seat.part):
            trainer = self._trainer()
            with self._coordinator(), self._client() as client:
                self._require_same_work(client)
                history = self._take_part(trainer, client, report)
                found: dict[str, Any] = json.loads(client.store.get(REPORT))
                client.store.add(ENDED, 1)
            if self.seat.hosts_coordinator and report is not None:
                print(*report_lines(found), sep="\n", flush=True)
        return history

    def _take_part(
        self, trainer: Trainer, client: Client, report: Report | None
    ) -> list[StepMetrics]:
        member = self._member(trainer, client)
        history: list[StepMetrics] = []

        def after(share: int, metrics: StepMetrics) -> None:
            history.append(replace(metrics, step=len(history) + 1))
            if report is not None:
                report(history[-1])
            self._save(trainer, member, share)

        try:
            member.run(after)
        except NothingLeftError as error:
            if not error.is_done:
                raise
            return history
        self._save(trainer, member, self.work.shares - 1, last=True)
        self._trace(member, client)
        return history

    def _require_same_work(self, client: Client) -> None:
        """Refuse a coordinator of another plan, or with other options."""
        if self.seat.hosts_coordinator or self.seat.part is not None:
            return
        theirs, mine = json.loads(client.store.get(ABOUT)), self.work.facts()
        different = [name for name in mine if theirs.get(name) != mine[name]]
        if different:
            raise PipeplanError(
                f"coordinator at {self.seat.meeting}: it has {name} {theirs.get(name)}, here it is "
                f"{mine[name]}; start all with the same plan, --steps, --sync and --resume"
                for name in different
            )

    def _trainer(self) -> Trainer:
        config, run = self.config, self.run_
        trainer = Trainer(
            self.prepared,
            self.feed.batch_of,
            seed=config.seed,
            optimizer_of=optimizer_of(self.plan, config, run.optimizer),
            clip_norm=config.clip_norm,
            factor=self._by_shares(config.rate_factor()),
            loss_scale=loss_scale_of(self.plan, config),
            autocast=autocast_of(config),
            timeout=timedelta(seconds=run.timeout_s),
            pace=None if run.pace is None else run.pace.of(self._ranks()),
        )
        if self.checkpoint is not None:
            self.saved.load(self.checkpoint, trainer.optimisation)
        return trainer

    def _ranks(self) -> list[int]:
        """In the whole plan, of this pipeline's places."""
        devices = self.lanes[self.seat.pipeline].devices
        return [self.plan.ranks.index(device) for device in devices]

    def _by_shares(self, factor: Factor) -> Factor:
        """A share is a step of one pipeline; the rate moves by steps of all of them."""
        return lambda share: factor(self.steps_before + (share - 1) // len(self.lanes) + 1)

    @contextmanager
    def _coordinator(self) -> Iterator[None]:
        if not self.seat.hosts_coordinator:
            yield
            return
        # Torchrun ends all ranks when one ends, so silence is a matter of its timeout here.
        supervised = SupervisedCoordinator(
            self.work, self.seat.meeting, self.run_.timeout_s, _end_all
        )
        try:
            yield
        finally:
            supervised.close()

    @contextmanager
    def _client(self) -> Iterator[Client]:
        seat = self.seat
        client = Client(seat.meeting, seat.pipeline, seat.place.rank, new_nonce())
        try:
            yield client
        finally:
            client.close()

    def _member(self, trainer: Trainer, client: Client) -> Member:
        timeout_s = self.run_.group_timeout_s
        host = own_address(self.seat.meeting)
        store = self.seat.meeting.connect()
        groups = Groups(store, client.pipeline, client.place, host, timeout_s)
        weights = Weights(trainer.optimisation, self.saved.buffers)
        server = TensorServer(host)
        neighbours = Neighbours(client, groups, server, trainer.optimisation, weights, timeout_s)
        between = between_of(self.options, neighbours, self.config.seed)
        return Member(trainer, neighbours, between, client, self.faults)

    def _trace(self, member: Member, client: Client) -> None:
        """The rank that hosts the coordinator gathers all ranks' times."""
        path, work = self.run_.sync_trace, self.work
        if path is None:
            return
        bytes_ = sum(flat.numel() * flat.element_size() for flat in member.weights.flat)
        member.times.publish(client.store, bytes_)
        if self.seat.hosts_coordinator or (self.seat.part is None and _is_first(self.seat)):
            sizes = work.pipelines, work.places, work.pipelines_per_node
            save_trace(Path(path), client.store, self.sync, *sizes)

    def _save(self, trainer: Trainer, member: Member, share: int, *, last: bool = False) -> None:
        """The first pipeline that is there writes: its own weights, and those of all at the end.

        Checkpoints resume under any plan. Shares below the newest that others have not ended yet
        count as seen.
        """
        table = self.config.checkpoint
        if table is None:
            return
        step = self.steps_before + (share + 1) // len(self.lanes)
        is_due = step // table.every > self._saved_step // table.every
        if is_due or (last and step > self._saved_step):
            self._saved_step = step
            if member.leads:
                seen = self.feed.samples_seen_after(share + 1)
                self.saved.save(table.folder, step, trainer.optimisation, seen, table.keep)


def _is_first(seat: Seat) -> bool:
    return seat.pipeline == 0 and seat.place.rank == 0


def _end_all(why: str) -> None:
    """All ranks wait for the coordinator, this one's main thread too; torchrun ends the others."""
    try:
        print(f"error: {why}\n", end="", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _require_known(config: TrainingConfig) -> None:
    if config.timeline is not None:
        raise PipeplanError(
            "timeline: pipelines that run side by side have no common iteration to draw; leave it "
            "out, or use one of all_reduce, fused, decoupled, cross_iteration"
        )
