"""Training by a plan whose pipelines run side by side, from beginning to end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from executor.checkpoint import Checkpoint, Ranks
from executor.config import CheckpointTable, TrainingConfig
from executor.coordinator.client import Client
from executor.coordinator.line import NothingLeftError
from executor.coordinator.report import report_lines
from executor.coordinator.store import ABOUT, ENDED, REPORT
from executor.coordinator.supervised import SupervisedCoordinator, Work, work_of
from executor.error_line import print_error
from executor.exchange.groups import Groups
from executor.exchange.neighbours import Neighbours
from executor.exchange.tensor_calls import TensorServer
from executor.exchange.weights import Weights
from executor.faults import Fault, Faults, parse_faults
from executor.feed import Feed
from executor.limits import DEFAULT_GROUP_TIMEOUT_S, require_timeout
from executor.metrics import StepMetrics
from executor.pipelines.checkpoints import PipelineCheckpoints
from executor.pipelines.lines import begin_line, end_lines, missed_lines
from executor.pipelines.member import Member
from executor.pipelines.seat import Seat, new_nonce, own_address, seat_of
from executor.pipelines.steps import WholeSteps
from executor.pipelines.trace import save_trace
from executor.pipelines.writing import Writing
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
from planner.sync.lanes import IN_STEP, lanes_of
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
        if run.group_timeout_s is not None:
            require_timeout(run.group_timeout_s, "group_timeout_s")
        self.injected = parse_faults(run.inject, len(self.lanes))
        self.faults = Faults(self.injected, self.seat.pipeline)
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
        before = 0 if checkpoint is None else self.saved.require_fits(checkpoint)
        self.steps = WholeSteps(before, len(self.lanes))
        self.feed = Feed(self.prepared, config, run.data, checkpoint, 1)

    @property
    def work(self) -> Work:
        """What the coordinator hands out."""
        return work_of(self.plan, self.config.steps - self.steps.before, self.sync)

    def train(self, report: Report | None = None) -> list[StepMetrics]:
        """Take part until all shares are done.

        Args:
            report: called after every step of this pipeline, by all its ranks.

        Returns:
            The metrics of this pipeline's steps.
        """
        run, seat = self.run_, self.seat
        tells = report is not None and seat.place.rank == 0
        with process_group(self.device, run.timeout_s, run.backend, seat.part):
            trainer = self._trainer()
            with self._coordinator(), self._client() as client:
                self._require_same_work(client)
                if tells and (seat.hosts_coordinator or seat.part is None):
                    print(begin_line(self.work, seat.pipeline, self._share_size), flush=True)
                begun_s = time.monotonic()
                history = self._take_part(trainer, client, report)
                found: dict[str, Any] = json.loads(client.store.get(REPORT))
                took_s = time.monotonic() - begun_s
                missed = self._missed_faults(client)
                client.store.add(ENDED, 1)
            if tells and seat.hosts_coordinator:
                print(*report_lines(found), sep="\n", flush=True)
            if tells and (seat.hosts_coordinator or seat.part is None):
                for line in (*missed_lines(missed), *end_lines(found, seat, history, took_s)):
                    print(line, flush=True)
        return history

    @property
    def _share_size(self) -> int:
        return len(self.lanes[self.seat.pipeline].microbatches)

    def _missed_faults(self, client: Client) -> list[Fault]:
        """Those that never happened, of all that this process is to tell of."""
        mine = None if self.seat.hosts_coordinator else self.seat.pipeline
        return [
            fault
            for fault in self.injected
            if mine in (None, fault.pipeline) and not client.store.check([_fault_key(fault)])
        ]

    def _take_part(
        self, trainer: Trainer, client: Client, report: Report | None
    ) -> list[StepMetrics]:
        member = self._member(trainer, client)
        checkpoints = self._checkpoints(trainer, member, client)
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
        checkpoints.at_end(self.work.shares - 1, self.run_.timeout_s)
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
            factor=self.steps.by_share(config.rate_factor()),
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
        given_s = self.run_.group_timeout_s
        timeout_s = DEFAULT_GROUP_TIMEOUT_S if given_s is None else given_s
        host = own_address(self.seat.meeting)
        store = self.seat.meeting.connect()
        groups = Groups(store, client.pipeline, client.place, host, timeout_s)
        weights = Weights(trainer.optimisation, self.saved.buffers)
        server = TensorServer(host)
        neighbours = Neighbours(client, groups, server, trainer.optimisation, weights, timeout_s)
        self.faults.tell = lambda fault: store.set(_fault_key(fault), "1")
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

    def _checkpoints(self, trainer: Trainer, member: Member, client: Client) -> PipelineCheckpoints:
        writing = Writing(client.store, Ranks.of_process_group(), self.seat.pipeline)

        def save(table: CheckpointTable, step: int, share: int) -> None:
            seen = self.feed.samples_seen_after(share + 1)
            self.saved.save(table.folder, step, trainer.optimisation, seen, table.keep)

        return PipelineCheckpoints(self.config.checkpoint, self.steps, member, writing, save)


def _fault_key(fault: Fault) -> str:
    """Where the store says that a fault has happened: who died of it cannot."""
    return f"fault {fault.word}"


def _is_first(seat: Seat) -> bool:
    return seat.pipeline == 0 and seat.place.rank == 0


def _end_all(why: str) -> None:
    """All ranks wait for the coordinator, this one's main thread too; torchrun ends the others."""
    try:
        print_error(why)
    finally:
        os._exit(1)


def _require_known(config: TrainingConfig) -> None:
    if config.timeline is not None:
        raise PipeplanError(
            "timeline: pipelines that run side by side have no common iteration to draw; leave it "
            f"out, or use {IN_STEP}"
        )
