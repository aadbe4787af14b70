"""Step times that ranks measure of their synchronisation, gathered into one trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from executor.coordinator.work import CoordinatorWork
from executor.runtime.runtime import StepRecord
from executor.runtime.timeline import on_clock_of_first_s, read_clock
from executor.training.loop import StepMetrics
from executor.training.optimisation import Factor
from planner.measured.sync_trace import SyncTrace
from planner.plan.plan import Plan, Sync
from planner.sync.pipeline_replicas import PipelineReplica, pipeline_replicas_of
from planner.sync.simulation.planned import from_plan

_GATHER_S = 10.0
"""All ranks end at about the same time."""
Row = tuple[int, float, float, float, list[int]]
"""Iteration, its start on the host's clock, computation and wait in seconds, and members."""


class PipelineStepTimes:
    """Notes one rank's iterations.

    Args:
        pipeline: of the rank.
    """

    def __init__(self, pipeline: int) -> None:
        self._pipeline = pipeline
        self._rows: list[Row] = []
        self._start_s = self._asked_s = 0.0
        self._members: tuple[int, ...] = ()
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """An iteration begins; the one before has ended."""
        self.end()
        self._iteration = iteration
        self._start_s = self._asked_s = time.time()
        self._members = (self._pipeline,)

    def asks(self) -> None:
        """The local step is done."""
        self._asked_s = time.time()

    def met(self, members: tuple[int, ...]) -> None:
        """These synchronised together."""
        if members:
            self._members = members

    def end(self) -> None:
        """The iteration is over."""
        if self._iteration:
            computed_s = max(0.0, self._asked_s - self._start_s)
            waited_s = max(0.0, time.time() - self._asked_s)
            row = self._iteration, self._start_s, computed_s, waited_s, list(self._members)
            self._rows.append(row)
        self._iteration = 0

    def publish(self, store: Store, place: int, parameter_bytes: int) -> None:
        """Put what was noted into the store that all ranks share.

        Args:
            store: of the training.
            place: of the rank.
            parameter_bytes: that it averages.
        """
        store.set(_key(self._pipeline, place), json.dumps([parameter_bytes, self._rows]))


def save_trace(path: Path, store: Store, work: CoordinatorWork) -> None:
    """Gather what all ranks published, and write the trace; ranks that are gone have no rows."""
    found = {
        (pipeline, place): json.loads(store.get(_key(pipeline, place)))
        for pipeline in range(work.pipelines)
        for place in range(work.places)
        if _has_come(store, _key(pipeline, place))
    }
    origin_s = min((row[1] for _, rows in found.values() for row in rows), default=0.0)
    sizes = [0] * work.places
    workers: list[list[dict[str, Any]]] = [[] for _ in range(work.pipelines)]
    for (pipeline, place), (parameter_bytes, rows) in found.items():
        sizes[place] = parameter_bytes
        for iteration, start_s, compute_s, wait_s, members in rows:
            row = {
                "iteration": iteration,
                "pipeline_rank": place,
                "start_s": start_s - origin_s,
                "compute_s": compute_s,
                "sync_wait_s": wait_s,
                "members": members,
            }
            workers[pipeline].append(row)
    ordered = [
        sorted(rows, key=lambda row: (row["iteration"], row["pipeline_rank"])) for rows in workers
    ]
    _trace(work.sync, work.pipelines_per_node, sizes, ordered).save(path)


def _key(pipeline: int, place: int) -> str:
    return f"trace/{pipeline}.{place}"


def _has_come(store: Store, key: str) -> bool:
    until_s = time.monotonic() + _GATHER_S
    while not store.check([key]):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def _trace(
    sync: Sync, pipelines_per_node: int, parameter_bytes: Sequence[int], workers: object
) -> SyncTrace:
    return SyncTrace.parse(
        {
            "format": "pipeplan-sync-trace/2",
            "sync": sync.model_dump(mode="json"),
            "pipelines_per_node": pipelines_per_node,
            "parameter_bytes": list(parameter_bytes),
            "workers": workers,
        }
    )


class SynchronousStepTimes:
    """Notes this rank's iterations, on the clock of the first rank.

    Args:
        plan: that runs, whose replicas form pipelines.
        rank: of this process.
        path: of the trace.

    Raises:
        PipeplanError: if they do not.
    """

    def __init__(self, plan: Plan, rank: int, path: str) -> None:
        self._plan = plan
        self._rank = rank
        self._path = Path(path)
        self._replicas = pipeline_replicas_of(plan)
        self._rows: list[tuple[float, float, float, float]] = []
        self._clock = read_clock()

    def add(self, metrics: StepMetrics, record: StepRecord) -> None:
        """Note an iteration of this rank."""
        asked_s = max([record.begin_s, *(span.end_s for span in record.operations)])
        self._rows.append((metrics.step, record.begin_s, asked_s, max(asked_s, record.end_s)))

    def save(self) -> None:
        """Gather all ranks' rows; the first rank writes them."""
        clock = read_clock()
        rows = [
            (step, *(on_clock_of_first_s(moment_s, self._clock, clock) for moment_s in moments_s))
            for step, *moments_s in self._rows
        ]
        mine = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        if self._rank == 0:
            self._trace(found).save(self._path)

    def _trace(self, found: Sequence[Tensor]) -> SyncTrace:
        origin_s = min(float(rows[:, 1].min()) for rows in found if len(rows))
        workers = [list(self._worker(replica, found, origin_s)) for replica in self._replicas]
        world = from_plan(self._plan)
        bytes_ = [rank.parameter_bytes for rank in world.ranks]
        return _trace(self._plan.sync, world.pipelines_per_node, bytes_, workers)

    def _worker(
        self, replica: PipelineReplica, found: Sequence[Tensor], origin_s: float
    ) -> Iterator[dict[str, object]]:
        for pipeline_rank, device in enumerate(replica.devices):
            for step, begin_s, asked_s, end_s in found[self._plan.ranks.index(device)].tolist():
                yield {
                    "iteration": int(step),
                    "pipeline_rank": pipeline_rank,
                    "start_s": begin_s - origin_s,
                    "compute_s": asked_s - begin_s,
                    "sync_wait_s": end_s - asked_s,
                    "members": list(range(len(self._replicas))),
                }


@dataclass(frozen=True)
class WholeSteps:
    """Steps of the whole training: each is as many shares as there are pipelines.

    Attributes:
        before: that it resumes after.
        pipelines: how many there are.
    """

    before: int
    pipelines: int

    def done_after(self, share: int) -> int:
        """Return how many steps are done once all work units up to this one are, counted from 0."""
        return self.before + (share + 1) // self.pipelines

    def by_share(self, factor: Factor) -> Factor:
        """The rate moves by steps of the whole, where a pipeline counts shares from 1."""
        return lambda share: factor(self.before + (share - 1) // self.pipelines + 1)
