"""Iterations one after the other, and what is told and written of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from executor.checkpoint import Ranks
from executor.metrics import Gathering, StepMetrics
from executor.place import Place
from executor.step_times import StepTimes
from executor.timeline import TimelineWriter
from planner.artifacts.plan import Plan
from planner.sync.strategies import STALE

Report = Callable[[StepMetrics], None]


class Stepper(Protocol):
    """Something that runs iterations."""

    def iterate(self, step: int) -> Gathering:
        """One iteration, after which ranks wait for each other only if their strategy does."""


class Loop:
    """Runs iterations.

    Args:
        plan: that runs.
        place: of this process.
        device: of its tensors.
        timeline: file for what really happened, or None.
        sync_trace: file for what synchronisation took, or None.
        report: called on every rank with the metrics of every iteration.
        emulated: whether nothing is computed.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        device: torch.device,
        timeline: str | None,
        sync_trace: str | None,
        report: Report | None,
        *,
        emulated: bool,
    ) -> None:
        self._report = report
        self._timeline = timeline
        self._sync_trace = sync_trace
        self._writer = None
        self._times = None
        # A wait for all ranks' metrics would undo that they may be apart by an iteration.
        self._lag = int(plan.sync.strategy in STALE)
        self._history: list[StepMetrics] = []
        self._gathering: list[Gathering] = []
        if timeline is not None:
            ranks = Ranks.of_process_group()
            self._writer = TimelineWriter(plan, place.rank, device, emulated=emulated, ranks=ranks)
        if sync_trace is not None:
            self._times = StepTimes(plan, place)

    def run(
        self, stepper: Stepper, steps: range, after: Callable[[int], None]
    ) -> list[StepMetrics]:
        """Run some steps; ``after`` is called with each one's number."""
        for step in steps:
            self._gathering.append(stepper.iterate(step))
            self._tell(self._lag)
            after(step)
        self._tell(0)
        if self._writer is not None and self._timeline is not None and self._history:
            self._writer.save(self._timeline)
        if self._times is not None and self._sync_trace is not None:
            self._times.save(self._sync_trace)
        return self._history

    def _tell(self, left: int) -> None:
        """Tell of all iterations but so many."""
        while len(self._gathering) > left:
            gathering = self._gathering.pop(0)
            metrics = gathering.metrics()
            self._history.append(metrics)
            if self._writer is not None:
                self._writer.add(metrics, gathering.record)
            if self._times is not None:
                self._times.add(metrics.step, gathering.record)
            if self._report is not None:
                self._report(metrics)
