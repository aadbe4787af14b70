"""What all steps of the search share: candidates, the incumbent and the bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, is_connected, place
from planner.partition.chain import Chain, Partition
from planner.partition.search.optimise import PartitionOptimiser
from planner.result import HistoryRow
from planner.schedule.heuristic import Schedule
from planner.schedule.recomputed import RecomputedSchedules
from planner.solver_settings import Clock, Settings
from planner.units import plural

if TYPE_CHECKING:
    from planner.partition.exact.own_constraints import ConstraintCheck
    from planner.partition.exact.search import Constrain

logger = logging.getLogger(__name__)

SECONDS_AN_OPERATION = 1e-4
"""What scheduling an operation counts in deterministic time."""
SAME = 1e-12
"""Times that differ by no larger share do so by rounding alone."""
Progress = Callable[[HistoryRow], None]


@dataclass(frozen=True)
class Candidate:
    """A partition with its best schedule so far.

    ``partition`` recomputes nothing; the schedule's pipeline says what is recomputed.
    ``proved_s`` bounds every schedule of these stages, whatever they recompute.
    """

    partition: Partition
    schedule: Schedule
    proved_s: float
    improved: bool = False

    @property
    def shares_devices(self) -> bool:
        """Whether a device holds several stages."""
        devices = [device for stage in self.partition for device in stage.devices]
        return len(set(devices)) < len(devices)

    @property
    def device_count(self) -> int:
        """How many devices hold a stage."""
        return len({device for stage in self.partition for device in stage.devices})


@dataclass
class Search:
    """The state of one search.

    Attributes:
        bound_s: no plan of the problem's space is faster.
        best: the incumbent.
        tried: number of partitions that were scheduled.
        infeasible: whether it is proved that nothing fits.
        longest_s: that scheduling a partition has taken so far.
    """

    problem: Problem
    settings: Settings
    clock: Clock
    gap_limit: float
    progress: Progress
    constrain: Constrain | None = None
    bound_s: float = 0.0
    history: list[HistoryRow] = field(default_factory=list)
    candidates: dict[Partition, Candidate] = field(default_factory=dict)
    best: Candidate | None = None
    tried: int = 0
    infeasible: bool = False
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self.chain = Chain(self.problem)
        self.recomputed = RecomputedSchedules(self.chain)
        limit = self.problem.job.max_stages or self.chain.length
        self.max_stages = min(limit, self.chain.length, len(self.problem.cluster.devices))
        self._check = self._constraint_check()
        self.optimiser = PartitionOptimiser(
            self.chain,
            self.max_stages,
            self.clock,
            self.settings.seed,
            self.allows,
            break_symmetry=self.constrain is None,
        )

    def _constraint_check(self) -> ConstraintCheck | None:
        if self.constrain is None:
            return None
        from planner.partition.exact.own_constraints import ConstraintCheck

        return ConstraintCheck(self.chain, self.max_stages, self.constrain)

    def allows(self, partition: Partition) -> bool:
        """Whether a partition keeps the layers' device rules and the user's constraints."""
        if not self.chain.keeps_rules(partition):
            return False
        return self._check is None or self._check.keeps(partition)

    @property
    def limit_s(self) -> float:
        """The time limit of the whole search."""
        return self.clock.left_s + self.clock.elapsed_s

    @property
    def best_s(self) -> float:
        """Iteration time of the incumbent; infinity without one."""
        return math.inf if self.best is None else self.best.schedule.iteration_time_s

    def is_done(self) -> bool:
        """Whether time is up or the gap is small enough."""
        if self.clock.left_s <= 0:
            return True
        if self.best is None:
            return self.infeasible
        return self.best_s <= self.bound_s * (1 + self.gap_limit)

    @property
    def has_time(self) -> bool:
        """Whether the time left suffices for another partition; the first is scheduled anyway."""
        return self.best is None or self.clock.left_s > self.longest_s

    def consider(self, partition: Partition) -> Candidate | None:
        """Schedule a partition quickly; None if it does not fit."""
        if partition in self.candidates:
            return self.candidates[partition]
        if not self.allows(partition):
            return None
        pipeline = place(self.problem, self.chain.specs(partition))
        return self.schedule(partition, pipeline) if is_connected(pipeline) else None

    def schedule(self, partition: Partition, pipeline: PlacedPipeline) -> Candidate | None:
        """Schedule a partition that was placed already; None if it does not fit."""
        self.tried += 1
        begin_s = self.clock.elapsed_s
        self.clock.spend(SECONDS_AN_OPERATION * pipeline.microbatches * len(partition))
        schedule = self.recomputed.best(partition, pipeline)
        self.longest_s = max(self.longest_s, self.clock.elapsed_s - begin_s)
        if schedule is None:
            return None
        candidate = Candidate(partition, schedule, self.recomputed.bound_s(partition, pipeline))
        self.candidates[partition] = candidate
        self._offer(candidate)
        return candidate

    def improve(self, candidate: Candidate, limit_s: float) -> Candidate:
        """Let CP-SAT search for a better schedule of a partition, once."""
        if candidate.improved or candidate.proved_s >= self.best_s or limit_s <= 0:
            return candidate
        schedule, bound_s = self.recomputed.improve(
            candidate.partition, candidate.schedule, self.settings, self.clock, limit_s
        )
        proved_s = max(candidate.proved_s, bound_s)
        better = Candidate(candidate.partition, schedule, proved_s, improved=True)
        self.candidates[candidate.partition] = better
        self._offer(better)
        return better

    def _offer(self, candidate: Candidate) -> None:
        if self._is_better(candidate):
            self.best = candidate
            self._record(
                f"plan: {plural(len(candidate.partition), 'stage')} on "
                f"{plural(candidate.device_count, 'device')}, {candidate.schedule.method}"
            )

    def _is_better(self, candidate: Candidate) -> bool:
        """Faster than the incumbent, or as fast on fewer devices."""
        time_s, best_s = candidate.schedule.iteration_time_s, self.best_s
        if self.best is None or abs(time_s - best_s) > SAME * best_s:
            return time_s < best_s
        return candidate.device_count < self.best.device_count

    def raise_bound(self, bound_s: float, event: str) -> None:
        """A new bound on every plan."""
        if bound_s > self.bound_s * (1 + SAME):
            self.bound_s = bound_s
            self._record(f"bound: {event}")

    def raise_single_bound(self, bound_s: float, event: str) -> None:
        """A new bound on every plan with one stage a device; no others may be in the space."""
        if self.problem.job.max_stages_per_device == 1:
            self.raise_bound(bound_s, event)

    def _record(self, event: str) -> None:
        if self.best is None:
            return
        row = HistoryRow(self.clock.elapsed_s, self.best_s, min(self.bound_s, self.best_s), event)
        self.history.append(row)
        logger.info("%8.2f s  %.6f s  bound %.6f s  %s", *row)
        self.progress(row)

    def proved_s(self, partition: Partition) -> float:
        """What is proved of all schedules of a partition: infinity if none fits."""
        if partition in self.candidates:
            return self.candidates[partition].proved_s
        pipeline = place(self.problem, self.chain.specs(partition))
        if not self.allows(partition) or not is_connected(pipeline):
            return math.inf
        return self.recomputed.bound_s(partition, pipeline)

    def ranked(self) -> list[Candidate]:
        """Candidates, the fastest first."""
        return sorted(self.candidates.values(), key=lambda c: c.schedule.iteration_time_s)

    def fastest_of_each_length(self) -> list[Candidate]:
        """The fastest candidate with each number of stages, one stage a device; fastest first."""
        of_each: dict[int, Candidate] = {}
        for candidate in self.ranked():
            if not candidate.shares_devices:
                of_each.setdefault(len(candidate.partition), candidate)
        return list(of_each.values())
