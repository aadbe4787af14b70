"""On tiny clusters: all partitions that may have a faster plan, decided one by one.

:func:`planner.bounds.list_partitions` lists every partition whose bound is below the best plan's
time. The walk's schedules are tried on each of them, and CP-SAT decides the rest: is there a
schedule of these stages that is faster (:mod:`planner.search.cp_sat.owner_model`)? So plans get
better, and the least bound of the partitions that are left is one of all plans. It has no
certificate: a plan says that it is the word of CP-SAT (``Proof.unchecked``, source ``solver``).

A step of a search calls it as follows::

    if may_decide(problem):
        for row in decide(problem, table, found.best_s, found.bound_s, limits):
            if row.better is not None:
                offer(row.better, row.better.orders, METHOD)
            take(row.bound_s)  # of all plans, without a certificate
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from planner.bounds import BoundedPartition, BoundedStage, PartitionList, list_partitions
from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.errors import DeadlockError, PipeplanError
from planner.plan.operations import Orders
from planner.plan.problem import Problem
from planner.search.clock import TASKS_PER_S
from planner.search.cp_sat.owner_model import OwnerModel
from planner.search.cp_sat.plan_model import Effort
from planner.search.walk.freedoms import freedoms_of
from planner.search.walk.plans import timeline_of
from planner.search.walk.starts import Start
from planner.search.walk.walker import Walker
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

METHOD = "CP-SAT's decision of partitions"
MOST_DEVICES, MOST_OPERATIONS = 8, 256
"""Devices of a cluster, and forwards of a plan with a stage on each device; beyond these, a
partition takes minutes."""
MOST_TRIED, MOST_DECIDED = 5_000, 200
"""Partitions that are scheduled by the walk, and those that are decided before more are listed."""
EFFORTS = ((0.3, 1.0), (0.5, 0.5), (0.5, 0.5), (1.0, 1.0), (1.0, 0.5), (2.0, 1.0), (4.0, 1.0))
"""How often CP-SAT tries a partition: its seconds, and how far between what is known of it and the
time to beat it looks. That no schedule is in the lower half is proved sooner than that none is."""
POLISHED, HEATS, TRIES = 16, np.geomspace(3e-3, 3e-5, 40), 100
"""Partitions of which orders are annealed, the heats, and changes of orders at each."""
OVERHEAD_S = 1e-4
"""Seconds of Python around a layout that is judged, and for each operation of a model."""
NARROW = 1e-5
"""Share of a time that is not divided further."""
BELOW = 1 / (1 + 0.9e-4)
"""A plan has to be faster by this factor to count as one; nearer ones are not looked for."""


class Decided(NamedTuple):
    """What is known after a partition was decided.

    Attributes:
        bound_s: no plan of the problem's space takes less.
        better: a plan that is faster than all before; None if none was found.
    """

    bound_s: float
    better: Timeline | None


@dataclass(frozen=True)
class Limits:
    """How long partitions may be decided.

    Attributes:
        left_s: seconds that are left.
        spend: told of seconds of CP-SAT's deterministic time.
        deterministic: whether CP-SAT's limits are in these.
        seed: of CP-SAT.
    """

    left_s: Callable[[], float]
    spend: Callable[[float], None] = lambda seconds: None
    deterministic: bool = False
    seed: int = 0


def may_decide(problem: Problem) -> bool:
    """Return whether a problem is small enough, and a partition says all but the schedule."""
    job, devices = problem.job, len(problem.cluster.devices)
    return (
        job.max_stages_per_device == 1
        and job.max_stages is None
        and not job.has_pipelines
        and job.lengths is None
        and job.order != "1f1b"
        and devices <= MOST_DEVICES
        and devices * job.microbatches <= MOST_OPERATIONS
    )


def decide(
    problem: Problem, table: StageTable, best_s: float, bound_s: float, limits: Limits
) -> Iterator[Decided]:
    """Yield better plans, and higher bounds on all plans, until nothing is left or time is up.

    Args:
        problem: for which :func:`may_decide` holds.
        table: of its stages.
        best_s: the time of the best plan.
        bound_s: that is proved already.
        limits: of time.

    Raises:
        PipeplanError: if the problem is too large.
    """
    if not may_decide(problem):
        raise PipeplanError(
            f"partitions are decided for one stage a device, free orders, microbatches of one "
            f"length and up to {MOST_DEVICES} devices; this problem is not one of those"
        )
    yield from _Decisions(problem, table, best_s, bound_s, limits).run()


@dataclass
class _Decisions:
    """The state of :func:`decide`, whose arguments it has."""

    problem: Problem
    table: StageTable
    best_s: float
    bound_s: float
    limits: Limits
    known_s: dict[tuple[BoundedStage, ...], float] = field(default_factory=dict)
    tries: Counter[tuple[BoundedStage, ...]] = field(default_factory=Counter)

    def run(self) -> Iterator[Decided]:
        """Schedule all partitions that may be faster, then decide them, the least bounds first."""
        for better in self._tried():
            yield Decided(self.bound_s, better)
        low_s = self.bound_s
        while low_s < self._target_s and self.limits.left_s() > 0:
            rows, limit_s = self._window(low_s)
            while any(map(self._is_open, rows)) and self.limits.left_s() > 0:
                row = min(filter(self._is_open, rows), key=self._turn)
                for better in self._decide(row):
                    yield Decided(self.bound_s, better)
            self.bound_s = max(self.bound_s, min([limit_s, self.best_s, *map(self._known_s, rows)]))
            yield Decided(self.bound_s, None)
            low_s = limit_s

    @property
    def _target_s(self) -> float:
        return self.best_s * BELOW

    def _tried(self) -> Iterator[Timeline]:
        """Yield better schedules by the walk, of any partition that may have one."""
        listed = self._listed(self._target_s, MOST_TRIED)
        network = NetworkTable.of(self.problem.cluster)
        walker = Walker(self.problem, self.table, network, freedoms_of(self.problem), 0)
        found, tasks = [], 0
        for row in listed.partitions:
            candidate = walker.start(self._start(row)) if self.limits.left_s() > 0 else None
            tasks = self._charge(walker, tasks)
            if candidate is not None:
                found.append(candidate)
        for candidate in sorted(found, key=lambda row: row.seconds)[:POLISHED]:
            seconds, layout = walker.layout(candidate)
            for heat in HEATS if self.limits.left_s() > 0 else ():
                seconds = min(seconds, walker.polish(heat, TRIES))
            tasks = self._charge(walker, tasks)
            if seconds < self._target_s:
                better = layout if candidate.seconds <= seconds else walker.polished_layout()
                yield from self._taken(timeline_of(better, self.table))

    def _listed(self, below_s: float, most: int) -> PartitionList:
        """Return the partitions of the job's space; what bounds count on has no least of stages."""
        found = list_partitions(self.problem, below_s, most=most)
        least = self.problem.job.min_stages
        kept = tuple(row for row in found.partitions if len(row.stages) >= least)
        return found._replace(partitions=kept)

    def _charge(self, walker: Walker, before: int) -> int:
        """Count the walk's work since so many tasks; return its tasks now."""
        self.limits.spend((walker.tasks_done - before) / TASKS_PER_S + OVERHEAD_S)
        return walker.tasks_done

    def _start(self, row: BoundedPartition) -> Start:
        numbers = self.problem.cluster.numbers
        devices = [tuple(numbers[name] for name in stage.devices) for stage in row.stages]
        return Start(tuple(stage.end for stage in row.stages), tuple(devices))

    def _taken(self, found: Timeline | None) -> Iterator[Timeline]:
        if found is None or found.overflow_bytes or found.iteration_time_s >= self._target_s:
            return
        self.best_s = found.iteration_time_s
        yield found

    def _window(self, low_s: float) -> tuple[tuple[BoundedPartition, ...], float]:
        """Return all partitions below a time, which is as high as few enough of them allow."""
        limit_s, most = self._target_s, MOST_DECIDED + len(self.tries)
        while True:
            listed = self._listed(limit_s, most)
            if listed.is_complete or limit_s < low_s * (1 + NARROW):
                return listed.partitions if listed.is_complete else (), limit_s
            limit_s = (limit_s + low_s) / 2

    def _known_s(self, row: BoundedPartition) -> float:
        return max(row.bound_s, self.known_s.get(row.stages, 0.0))

    def _is_open(self, row: BoundedPartition) -> bool:
        return self._known_s(row) < self._target_s and self.tries[row.stages] < len(EFFORTS)

    def _turn(self, row: BoundedPartition) -> tuple[bool, float]:
        """Return by what partitions are tried: each once, then that with the least bound."""
        return self.tries[row.stages] > 0, self._known_s(row)

    def _decide(self, row: BoundedPartition) -> Iterator[Timeline]:
        """Look for a faster schedule of a partition, and note what is proved of all of them."""
        left_s, (seconds, share) = self.limits.left_s(), EFFORTS[self.tries[row.stages]]
        if left_s <= 0:
            return
        self.tries[row.stages] += 1
        placed = self._placed(row)
        if placed is None:
            self.known_s[row.stages] = math.inf
        if placed is None or not _is_decided_by_orders(placed):
            self.tries[row.stages] = len(EFFORTS)
            return
        known_s = self._known_s(row)
        model = OwnerModel(placed, known_s + share * (self._target_s - known_s))
        effort = Effort(min(seconds, left_s), self.limits.deterministic, self.limits.seed)
        found = model.solve(effort)
        self.limits.spend(found.spent_s + OVERHEAD_S * len(placed.stages) * placed.microbatches)
        self.known_s[row.stages] = max(known_s, found.bound_s)
        if found.is_optimal:
            self.tries[row.stages] = len(EFFORTS)
        if found.orders is not None:
            yield from self._taken(_replayed(placed, found.orders))

    def _placed(self, row: BoundedPartition) -> PlacedPipeline | None:
        """Return the stages on their devices; None if no path joins two of them."""
        names = self.problem.graph.layers
        specs = [
            StageSpec(tuple(names)[stage.begin : stage.end], stage.devices) for stage in row.stages
        ]
        try:
            placed = place(self.problem, specs)
            for stage, (first, second) in enumerate(pairwise(specs)):
                for pair in product(first.devices, second.devices):
                    placed.transfer(stage, "F", *pair)
        except PipeplanError:
            return None
        return placed


def _replayed(placed: PlacedPipeline, orders: Orders) -> Timeline | None:
    try:
        return simulate(placed, orders)
    except DeadlockError:
        return None


def _is_decided_by_orders(placed: PlacedPipeline) -> bool:
    """Return whether only orders are left to choose: no layer has to run again for its memory."""
    space = placed.problem.job.space
    if not (space.recompute or space.offload):
        return True
    return all(
        stage.stash_bytes * placed.microbatches
        <= placed.capacity_bytes(device) - placed.static_bytes(device)
        for stage in placed.stages
        for device in stage.spec.devices
    )
