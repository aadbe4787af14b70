"""Decentralized training by a plan, from beginning to end."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from executor.checkpoint.ranks import Ranks
from executor.coordinator.client import Client
from executor.coordinator.line import NothingLeftError
from executor.coordinator.log import report_lines
from executor.coordinator.store import ENDED, REPORT
from executor.coordinator.supervised import CoordinatorWork
from executor.distributed.machines import require_machines
from executor.distributed.process_group import process_group
from executor.elastic.checkpoints import PipelineCheckpoints, Writing
from executor.elastic.faults import Faults, InjectedFault, missed_faults, note_fault
from executor.elastic.member import PipelineMember
from executor.elastic.neighbours import Neighbours
from executor.elastic.process_groups import DynamicGroups
from executor.elastic.rank_assignment import RankAssignment, own_address
from executor.elastic.setup import Setup, met
from executor.elastic.tensor_calls import TensorServer
from executor.elastic.trace import PipelineStepTimes, save_trace
from executor.elastic.weights import Weights
from executor.launch.config import CheckpointTable, TrainingConfig
from executor.launch.run import RunSettings
from executor.sync.averaging import decentralized_strategy_of
from executor.training.loop import Loop, Report, StepMetrics
from executor.training.optimisation import Optimisation
from executor.training.trainer import Trainer
from planner.plan.plan import Plan
from planner.units import plural


def begin_line(work: CoordinatorWork, pipeline: int, share_size: int) -> str:
    """The strategy, the pipelines and the shares, before the first step.

    Args:
        work: that all share.
        pipeline: whose steps are printed.
        share_size: microbatches of a share.
    """
    return (
        f"{work.sync.strategy}: {plural(work.pipelines, 'pipeline')} of "
        f"{plural(work.places, 'rank')} side by side, {plural(work.shares, 'work unit')} of "
        f"{plural(share_size, 'microbatch', 'es')} in all; the lines of steps are of "
        f"pipeline {pipeline}'s own"
    )


def end_lines(
    report: dict[str, Any],
    assignment: RankAssignment,
    history: Sequence[StepMetrics],
    took_s: float,
) -> Iterator[str]:
    """Yield what all have trained, and how fast; nothing if this pipeline had no work unit.

    Args:
        report: the coordinator's.
        assignment: of who prints it.
        history: of its pipeline.
        took_s: from the first share to the last.
    """
    if not history:
        return
    done, number = report["committed"], len(report["incarnations"])
    first, last = history[0].loss, history[-1].loss
    yield (
        f"trained {plural(done, 'work unit')} on {plural(number, 'pipeline')}, "
        f"{done / took_s:.3g} a second; {len(history)} of them on pipeline "
        f"{assignment.pipeline}, whose own loss went {first:.4f} -> {last:.4f}"
    )


def missed_lines(faults: Sequence[InjectedFault]) -> Iterator[str]:
    """Faults on purpose that did not happen."""
    for fault in faults:
        why = {
            "return": "its pipeline was not started again",
            "at": f"its pipeline did not begin step {fault.step}",
            "in": f"its pipeline had no average of several members under way at step {fault.step}",
        }["return" if fault.kind == "return" else fault.moment]
        yield f"inject: {fault.word} never happened: {why}"


logger = logging.getLogger(__name__)
_CALLERS_A_PIPELINE = 8
"""Threads of a rank that may call another at once, with those of an incarnation before it."""


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

    def __init__(self, plan: Plan, config: TrainingConfig, run: RunSettings) -> None:
        self._setup = Setup(plan, config, run)

    @property
    def work(self) -> CoordinatorWork:
        """What the coordinator hands out."""
        return self._setup.work

    def train(self, report: Report | None = None) -> list[StepMetrics]:
        """Take part until all shares are done.

        Args:
            report: called after every step of this pipeline, by all its ranks.

        Returns:
            The metrics of this pipeline's steps.
        """
        setup, run, assignment = self._setup, self._setup.run, self._setup.assignment
        prints = report is not None and assignment.prints
        meeting = process_group(setup.device, run.timeout_s, run.backend, assignment.part)
        with meeting as machines:
            require_machines(setup.prepared.plan, machines)
            optimisation = setup.optimisation()
            with met(setup) as client:
                if prints:
                    logger.info("%s", begin_line(self.work, assignment.pipeline, setup.share_size))
                begun_s = time.monotonic()
                history = self._take_part(optimisation, client, report)
                found: dict[str, Any] = json.loads(client.store.get(REPORT))
                took_s = time.monotonic() - begun_s
                missed = missed_faults(client.store, setup.injected, assignment)
                client.store.add(ENDED, 1)
            if prints:
                for line in self._last_lines(found, missed, history, took_s):
                    logger.info("%s", line)
        return history

    def _last_lines(
        self,
        found: dict[str, Any],
        missed: Sequence[InjectedFault],
        history: Sequence[StepMetrics],
        took_s: float,
    ) -> Iterator[str]:
        assignment = self._setup.assignment
        if assignment.hosts_coordinator:
            yield from report_lines(found)
        yield from missed_lines(missed)
        yield from end_lines(found, assignment, history, took_s)

    def _take_part(
        self, optimisation: Optimisation, client: Client, report: Report | None
    ) -> list[StepMetrics]:
        """Make this rank's parts, each of those before it, and train."""
        setup, assignment = self._setup, self._setup.assignment
        store, host = assignment.meeting.connect(), own_address(assignment.meeting)
        faults = Faults(setup.injected, assignment.pipeline, partial(note_fault, store))
        times = PipelineStepTimes(client.pipeline, client.place, client.store)
        weights = Weights(optimisation, setup.saved.buffers)
        groups = DynamicGroups(
            assignment.meeting.connect,
            *(client.pipeline, client.place, host, setup.group_timeout_s),
            faults.inside,
        )
        neighbours = Neighbours(
            client,
            groups,
            TensorServer(host, client.key, _CALLERS_A_PIPELINE * len(setup.replicas)),
            optimisation,
            weights,
            setup.group_timeout_s,
            times.met,
        )
        strategy = decentralized_strategy_of(
            setup.options, neighbours, setup.config.seed, setup.make_optimizer
        )
        member = PipelineMember(
            setup.prepared.plan,
            assignment.place.rank,
            optimisation,
            neighbours,
            strategy,
            client,
            times,
            faults,
        )
        with closing(member):
            trainer = self._trainer(optimisation, member)
            checkpoints = self._checkpoints(optimisation, member, client)
            loop = Loop(report)
            steps = (unit + 1 for unit in member.work_units())
            try:
                loop.run(trainer, steps, lambda step: checkpoints.after(step - 1))
            except NothingLeftError as error:
                if not error.is_done:
                    raise
                return loop.history
            checkpoints.at_end(self.work.shares - 1, setup.run.timeout_s)
            self._trace(times, weights, client)
            return loop.history

    def _trainer(self, optimisation: Optimisation, member: PipelineMember) -> Trainer:
        """Return the trainer of the pipeline, whose optimizer steps are the member's."""
        setup, run = self._setup, self._setup.run
        return Trainer.of_model(
            setup.prepared,
            setup.feed.batch_of,
            optimisation=optimisation,
            optimise=member.optimise,
            timeout=timedelta(seconds=run.timeout_s),
            pace=None if run.pace is None else run.pace.of(setup.ranks),
        )

    def _checkpoints(
        self, optimisation: Optimisation, member: PipelineMember, client: Client
    ) -> PipelineCheckpoints:
        """Return the pipeline's checkpoints, written when they are due and it is its turn."""
        setup = self._setup
        writing = Writing(client.store, Ranks.of_process_group(), setup.assignment.pipeline)

        def save(table: CheckpointTable, step: int, share: int) -> None:
            seen = setup.feed.samples_seen_after(share + 1)
            setup.saved.save(table.folder, step, optimisation, seen, table.keep)

        return PipelineCheckpoints(setup.config.checkpoint, setup.steps, member, writing, save)

    def _trace(self, times: PipelineStepTimes, weights: Weights, client: Client) -> None:
        """Gather all ranks' times, on the coordinator's host or else the very first rank."""
        setup, work = self._setup, self.work
        path, assignment = setup.run.sync_trace, setup.assignment
        if path is None:
            return
        bytes_ = sum(flat.numel() * flat.element_size() for flat in weights.flat)
        times.publish(client.store, bytes_)
        if assignment.hosts_coordinator or (assignment.prints and assignment.pipeline == 0):
            sizes = work.pipelines, work.places, work.pipelines_per_node
            save_trace(Path(path), client.store, work.sync, *sizes)
