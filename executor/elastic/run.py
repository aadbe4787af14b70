"""Decentralized training by a plan, from beginning to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.checkpoint.ranks import Ranks
from executor.coordinator.client import Client, NothingLeftError
from executor.coordinator.notes import report_lines
from executor.coordinator.watch import tell_parent
from executor.coordinator.work import CoordinatorWork
from executor.distributed.machines import require_machines
from executor.distributed.process_group import process_group
from executor.elastic.checkpoints import PipelineCheckpoints
from executor.elastic.faults import Faults, InjectedFault
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
from planner.plan.plan import Plan
from planner.units import plural


def begin_line(work: CoordinatorWork, pipeline: int, share_size: int) -> str:
    """Return the strategy, the pipelines and the work units, before the first step.

    Args:
        work: that all pipelines do.
        pipeline: whose steps are printed.
        share_size: microbatches of a work unit.
    """
    return (
        f"{work.sync.strategy}: {plural(work.pipelines, 'pipeline')} of "
        f"{plural(work.places, 'rank')} side by side, {plural(work.shares, 'work unit')} of "
        f"{plural(share_size, 'microbatch', 'es')} in all; the steps are pipeline {pipeline}'s, "
        "their loss is the mean over the pipelines' last ones"
    )


def end_lines(
    report: Mapping[str, Any],
    assignment: RankAssignment,
    history: Sequence[StepMetrics],
    took_s: float,
) -> Iterator[str]:
    """Yield what all have trained, and how fast; nothing if this pipeline had no work unit.

    Args:
        report: the coordinator's.
        assignment: of the rank that prints it.
        history: of its pipeline.
        took_s: from the first work unit to the last.
    """
    if not history:
        return
    done, number = report["committed"], len(report["incarnations"])
    first, last = history[0].loss, history[-1].loss
    yield (
        f"trained {plural(done, 'work unit')} on {plural(number, 'pipeline')}, "
        f"{done / took_s:.3g} a second, {len(history)} of them on pipeline "
        f"{assignment.pipeline}; loss {first:.4f} -> {last:.4f}"
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
    """This rank's part of a training whose pipelines run in parallel.

    Args:
        plan: with all pipelines, and the strategy.
        config: of the training.
        run: how it is run.
        emulates: whether operations only take their predicted time, with real messages and
            averages; there is no model and no data.

    Raises:
        PipeplanError: if the plan cannot be run so; before any process group is made where one
            rank can tell.
    """

    def __init__(
        self, plan: Plan, config: TrainingConfig, run: RunSettings, *, emulates: bool = False
    ) -> None:
        self._setup = Setup(plan, config, run, emulates=emulates)

    @property
    def work(self) -> CoordinatorWork:
        """What the coordinator hands out."""
        return self._setup.work

    def train(self, report: Report | None = None) -> list[StepMetrics]:
        """Take part until all work units are done.

        Args:
            report: called after every step of this pipeline, by all its ranks.

        Returns:
            The metrics of this pipeline's steps; their loss is the mean over the pipelines' last.
        """
        setup, run, assignment = self._setup, self._setup.run, self._setup.assignment
        prints = report is not None and assignment.prints
        meeting = process_group(setup.device, run.timeout_s, run.backend, assignment.part)
        with meeting as machines:
            require_machines(setup.part, machines)
            optimisation = setup.optimisation()
            with met(setup) as (client, connect):
                if prints:
                    logger.info("%s", begin_line(self.work, assignment.pipeline, setup.share_size))
                begun_s = time.monotonic()
                history = self._take_part(optimisation, client, connect, report)
                found = client.bye()
                took_s = time.monotonic() - begun_s
        if prints:
            for line in self._last_lines(found, history, took_s):
                logger.info("%s", line)
        return history

    def _last_lines(
        self, found: Mapping[str, Any], history: Sequence[StepMetrics], took_s: float
    ) -> Iterator[str]:
        assignment = self._setup.assignment
        if assignment.hosts_coordinator:
            yield from report_lines(found)
        mine = None if assignment.hosts_coordinator else assignment.pipeline
        yield from missed_lines(
            [
                fault
                for fault in self._setup.injected
                if mine in (None, fault.pipeline) and fault.word not in found["faults"]
            ]
        )
        yield from end_lines(found, assignment, history, took_s)

    def _take_part(
        self,
        optimisation: Optimisation,
        client: Client,
        connect: Callable[[], Store],
        report: Report | None,
    ) -> list[StepMetrics]:
        """Make this rank's parts, each of those before it, and train."""
        setup = self._setup
        host = own_address(client.endpoint)
        faults = Faults(
            setup.injected, client.pipeline, lambda fault: client.note_fault(fault.word)
        )
        times = PipelineStepTimes(client.pipeline)
        weights = Weights(optimisation, setup.buffers)
        groups = DynamicGroups(
            connect,
            lambda: client.there,
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
            setup.part, optimisation, neighbours, strategy, client, times, faults
        )
        with closing(member):
            trainer = setup.trainer(optimisation, member.optimise)
            checkpoints = self._checkpoints(optimisation, member, client)
            loop = Loop(report, loss_of=client.mean_loss)
            steps = (unit + 1 for unit in member.work_units(lambda: tell_parent("begun")))
            try:
                loop.run(trainer, steps, lambda step: checkpoints.after(step - 1))
            except NothingLeftError as error:
                if not error.is_done:
                    raise
                return loop.history
            checkpoints.at_end(self.work.shares - 1, setup.run.timeout_s)
            self._trace(times, weights, client, connect())
            return loop.history

    def _checkpoints(
        self, optimisation: Optimisation, member: PipelineMember, client: Client
    ) -> PipelineCheckpoints:
        """Return the pipeline's checkpoints, written when they are due and it is its turn."""
        setup = self._setup

        def save(table: CheckpointTable, step: int, share: int) -> None:
            seen = setup.feed.samples_seen_after(share + 1)
            setup.saved.save(table.folder, step, optimisation, seen, table.keep)

        ranks, table = Ranks.of_process_group(), setup.config.checkpoint
        return PipelineCheckpoints(table, setup.steps, member, client, ranks, save)

    def _trace(
        self, times: PipelineStepTimes, weights: Weights, client: Client, store: Store
    ) -> None:
        """Gather all ranks' times, on the coordinator's host or else the very first rank."""
        path, assignment = self._setup.run.sync_trace, self._setup.assignment
        if path is None:
            return
        bytes_ = sum(flat.numel() * flat.element_size() for flat in weights.flat)
        times.publish(store, client.place, bytes_)
        if assignment.hosts_coordinator or (assignment.prints and assignment.pipeline == 0):
            save_trace(Path(path), store, self.work)
