"""The state of a search: what is asked, the clock, and what has been found and proved."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import is_connected, place
from planner.plan.certificate import BoundSource
from planner.plan.membership import outside
from planner.plan.problem import Problem
from planner.search.budget import Clock, SearchWork, Settings
from planner.search.certification import Certifier
from planner.search.idle_replicas import without_idle_replicas
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.optimiser import PartitionOptimiser
from planner.search.recomputed import RecomputedSchedules
from planner.search.result import HistoryRow
from planner.search.schedule.heuristic import Schedule, quick_estimate_s
from planner.search.schedule.pipeline_groups import operation_count
from planner.space import Space
from planner.units import plural

if TYPE_CHECKING:
    from planner.search.partition.cp_sat.search import Constrain, ConstraintCheck

logger = logging.getLogger(__name__)

SAME = 1e-12
"""Times that differ by no larger share do so by rounding alone."""
NEAR = 1.05
"""Times the best: partitions that seem slower by more get only a few quick schedules."""
AT_ONCE, AT_ONCE_S = 0.02, 0.2
"""Share of the time limit, or seconds, that all quick schedules of a partition may take at once."""
Progress = Callable[[HistoryRow], None]


@dataclass(frozen=True)
class Candidate:
    """A partition with its best schedule so far.

    ``partition`` recomputes nothing; the schedule's pipeline says what is recomputed.
    ``proved_s`` bounds every schedule of these stages, whatever they recompute. ``has_few``: not
    all quick schedules of it were tried.
    """

    partition: Partition
    schedule: Schedule
    proved_s: float
    improved: bool = False
    has_few: bool = False

    @property
    def shares_devices(self) -> bool:
        """Whether a device holds several stages."""
        devices = [device for stage in self.partition for device in stage.devices]
        return len(set(devices)) < len(devices)

    @property
    def device_count(self) -> int:
        """Number of devices that hold a stage."""
        return len({device for stage in self.partition for device in stage.devices})


@dataclass(frozen=True)
class SearchTask:
    """The task of a search; nothing of it changes while the search runs.

    Attributes:
        problem: the model, cluster and job.
        settings: of the solvers.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        constrain: adds the user's constraints to a partition model.
        without_steps: names of steps that are left out.
    """

    problem: Problem
    settings: Settings
    gap_limit: float
    constrain: Constrain | None = None
    without_steps: frozenset[str] = frozenset()

    @cached_property
    def chain(self) -> Chain:
        """The layers in a row."""
        return Chain(self.problem)

    @cached_property
    def _check(self) -> ConstraintCheck | None:
        if self.constrain is None:
            return None
        from planner.search.partition.cp_sat.search import ConstraintCheck

        return ConstraintCheck(self.chain, self.chain.max_stages, self.constrain)

    def allows(self, partition: Partition) -> bool:
        """Return whether a partition lies in the job's space and keeps the user's constraints."""
        if not self.chain.keeps_rules(partition) or not self._is_in_space(partition):
            return False
        return self._check is None or self._check.keeps(partition)

    @cached_property
    def space(self) -> Space:
        """The freedoms that plans may use."""
        return self.problem.job.space

    def _is_in_space(self, partition: Partition) -> bool:
        """Return whether stages have the form that the job asks for; moves keep to the rest."""
        space = self.space
        if space.min_stages == 1 and space.placement == "any" and not space.has_pipelines:
            return True
        if space.has_pipelines and self.problem.job.microbatches % len(partition[0].devices):
            return False
        return not any(outside(space, self.chain.specs(partition), {}, self.chain.names))

    def allows_orders(self, schedule: Schedule) -> bool:
        """Return whether the orders of a schedule lie in the job's space."""
        if self.space.order == "any" and not self.space.has_pipelines:
            return True
        specs = [stage.spec for stage in schedule.timeline.pipeline.stages]
        return not any(outside(self.space, specs, schedule.orders, self.chain.names))


class Findings:
    """The findings of a search so far: plans, the incumbent and the bound.

    Args:
        clock: gives the time of each row of the history.
        progress: called with each row.

    Attributes:
        best: the incumbent.
        bound_s: no plan of the problem's space is faster.
        bound_source, bound_event: what proved it, and in which step.
        candidates: every partition that was scheduled and fits.
        history: every new incumbent or bound.
        tried: number of partitions that were scheduled.
        is_infeasible: whether it is proved that nothing fits.
    """

    def __init__(self, clock: Clock, progress: Progress) -> None:
        self._clock = clock
        self._progress = progress
        self.best: Candidate | None = None
        self.bound_s = 0.0
        self.bound_source: BoundSource = "relaxation"
        self.bound_event = "nothing"
        self.candidates: dict[Partition, Candidate] = {}
        self.history: list[HistoryRow] = []
        self.tried = 0
        self.is_infeasible = False

    @property
    def best_s(self) -> float:
        """Iteration time of the incumbent; infinity without one."""
        return math.inf if self.best is None else self.best.schedule.iteration_time_s

    def add(self, candidate: Candidate) -> None:
        """Keep a candidate, in place of an older one of its partition."""
        self.candidates[candidate.partition] = candidate
        if self._is_better(candidate):
            self.best = candidate
            self._record(
                f"plan: {plural(len(candidate.partition), 'stage')} on "
                f"{plural(candidate.device_count, 'device')}, {candidate.schedule.method}"
            )

    def _is_better(self, candidate: Candidate) -> bool:
        """Return whether it is faster than the incumbent, or as fast on fewer devices."""
        time_s, best_s = candidate.schedule.iteration_time_s, self.best_s
        if self.best is None or abs(time_s - best_s) > SAME * best_s:
            return time_s < best_s
        return candidate.device_count < self.best.device_count

    def raise_bound(self, bound_s: float, event: str, source: BoundSource = "relaxation") -> None:
        """Keep a bound on every plan if it is higher.

        Args:
            bound_s: the bound.
            event: the step that proved it.
            source: what proved it: a program of ours, or CP-SAT.
        """
        if bound_s > self.bound_s * (1 + SAME):
            self.bound_s, self.bound_source, self.bound_event = bound_s, source, event
            self._record(f"bound: {event}")

    def _record(self, event: str) -> None:
        if self.best is None:
            return
        row = HistoryRow(self._clock.elapsed_s, self.best_s, min(self.bound_s, self.best_s), event)
        self.history.append(row)
        logger.info("%8.2f s  %.6f s  bound %.6f s  %s", *row)
        self._progress(row)

    def ranked(self) -> list[Candidate]:
        """Return the candidates, the fastest first."""
        return sorted(self.candidates.values(), key=lambda c: c.schedule.iteration_time_s)


class Search:
    """One search: a task, a clock, and findings that its steps add to.

    Args:
        task: what is asked.
        clock: of the time limit.
        progress: called with every new incumbent or bound.

    Attributes:
        max_stages: the most stages with one a device.
        most_stages: the most stages with as many a device as the job allows.
        optimiser: finds partitions and bounds them.
        recomputed: schedules partitions.
        schedules_until_s: elapsed time from which a partition gets only a few schedules.
        longest_s: the longest that scheduling a partition has taken so far.
    """

    def __init__(self, task: SearchTask, clock: Clock, progress: Progress | None = None) -> None:
        self.task = task
        self.clock = clock
        self.found = Findings(clock, progress or (lambda row: None))
        self.problem, self.settings, self.chain = task.problem, task.settings, task.chain
        self.max_stages = task.chain.max_stages
        single = task.problem.job.max_stages_per_device == 1
        self.most_stages = self.max_stages if single else task.chain.stage_limit
        self.allows = task.allows
        self.recomputed = RecomputedSchedules(
            task.chain, has_time=lambda: clock.may_go_on(self.schedules_until_s)
        )
        self.schedules_until_s = clock.limit_s
        self.longest_s = 0.0
        self._seeds = itertools.count(task.settings.seed)
        self.optimiser = PartitionOptimiser(
            task.chain,
            self.max_stages,
            clock,
            task.settings.seed,
            task.allows,
            break_symmetry=task.constrain is None,
        )

    @cached_property
    def certifier(self) -> Certifier:
        """Looks for certificates of the bounds that are found."""
        return Certifier(self.chain, self.clock)

    @property
    def best(self) -> Candidate | None:
        """The incumbent."""
        return self.found.best

    @property
    def best_s(self) -> float:
        """Iteration time of the incumbent; infinity without one."""
        return self.found.best_s

    @property
    def candidates(self) -> dict[Partition, Candidate]:
        """Every partition that was scheduled and fits."""
        return self.found.candidates

    @property
    def has_single_stages(self) -> bool:
        """Whether the job allows no device more than one stage."""
        return self.problem.job.max_stages_per_device == 1

    def next_seed(self) -> int:
        """Return a seed for a walk, another one each time."""
        return next(self._seeds)

    def is_done(self) -> bool:
        """Return whether time is up or the gap is small enough."""
        if self.clock.left_s <= 0:
            return True
        if self.best is None:
            return self.found.is_infeasible
        return self.best_s <= self.found.bound_s * (1 + self.task.gap_limit)

    @property
    def has_time(self) -> bool:
        """Whether the time left suffices for another partition; the first is scheduled anyway."""
        return self.best is None or self.clock.left_s > self.longest_s

    def consider(self, partition: Partition) -> Candidate | None:
        """Schedule a partition quickly; return None if it does not fit."""
        if partition in self.candidates:
            return self.candidates[partition]
        if not self.allows(partition):
            return None
        pipeline = place(self.problem, self.chain.specs(partition))
        return self.schedule(partition, pipeline) if is_connected(pipeline) else None

    def estimate_s(
        self, partition: Partition, pipeline: PlacedPipeline, most_s: float = math.inf
    ) -> float | None:
        """Return a quick estimate of an iteration, with the likeliest choices to recompute.

        Args:
            partition: stages on devices.
            pipeline: the same stages placed, nothing recomputed.
            most_s: longer times are of no interest.

        Returns:
            Seconds; None if memory is too small for its schedule, or bounds exceed ``most_s``.
        """
        choices = self.recomputed.choices(partition, pipeline, most_s)
        self.clock.charge(SearchWork.ESTIMATED_OPERATION, operation_count(pipeline) * len(choices))
        return quick_estimate_s(*choices, split=self.chain.splits) if choices else None

    def schedule(self, partition: Partition, pipeline: PlacedPipeline) -> Candidate | None:
        """Schedule a partition that was placed already; return None if it does not fit.

        Where all quick schedules take long, or the partition seems far from the best, it gets a
        few: see :meth:`complete`.
        """
        self.found.tried += 1
        begin_s = self.clock.elapsed_s
        has_few = self._takes_long(pipeline) or not self._may_be_near(partition, pipeline)
        unit = SearchWork.ESTIMATED_OPERATION if has_few else SearchWork.SCHEDULED_OPERATION
        self.clock.charge(unit, operation_count(pipeline))
        schedule = self.recomputed.best(partition, pipeline, few=has_few)
        self.longest_s = max(self.longest_s, self.clock.elapsed_s - begin_s)
        if schedule is None or not self.task.allows_orders(schedule):
            return None
        proved_s = self.recomputed.bound_s(partition, pipeline)
        candidate = Candidate(partition, schedule, proved_s, has_few=has_few)
        self._keep(candidate)
        return candidate

    def complete(self, candidate: Candidate) -> None:
        """Try all quick schedules of a candidate that got a few."""
        if not candidate.has_few:
            return
        pipeline = place(self.problem, self.chain.specs(candidate.partition))
        self.clock.charge(SearchWork.SCHEDULED_OPERATION, operation_count(pipeline))
        found = self.recomputed.best(candidate.partition, pipeline)
        known = candidate.schedule
        if found is None or found.iteration_time_s >= known.iteration_time_s:
            found = known
        schedule = found if self.task.allows_orders(found) else known
        self._keep(replace(candidate, schedule=schedule, has_few=False))

    def is_near(self, time_s: float) -> bool:
        """Return whether an iteration time is so near the best that all schedules are tried."""
        return time_s <= NEAR * self.best_s

    def _takes_long(self, pipeline: PlacedPipeline) -> bool:
        """Return whether all quick schedules would take much of the time limit."""
        seconds = SearchWork.SCHEDULED_OPERATION.seconds * operation_count(pipeline)
        return seconds > max(AT_ONCE_S, AT_ONCE * self.clock.limit_s)

    def _may_be_near(self, partition: Partition, pipeline: PlacedPipeline) -> bool:
        """Return whether a partition may be as fast as the best, all schedules tried."""
        if self.best is None:
            return True
        estimate_s = self.estimate_s(partition, pipeline)
        return estimate_s is None or self.is_near(estimate_s)

    def _keep(self, candidate: Candidate) -> None:
        """Keep a candidate, and besides it the one without its idle replicas."""
        self.found.add(candidate)
        schedule = self.without_idle_replicas(candidate.schedule)
        if schedule is not candidate.schedule:
            partition = self._partition_of(schedule)
            known = self.candidates.get(partition)
            if known is None or schedule.iteration_time_s < known.schedule.iteration_time_s:
                proved_s = self.proved_s(partition)
                is_improved = known is not None and known.improved
                self.found.add(Candidate(partition, schedule, proved_s, is_improved))

    def without_idle_replicas(self, schedule: Schedule) -> Schedule:
        """Return a schedule without replicas that run no microbatch, if the task allows that."""
        found = without_idle_replicas(schedule)
        return found if found is schedule or self.allows(self._partition_of(found)) else schedule

    def _partition_of(self, schedule: Schedule) -> Partition:
        specs = [stage.spec for stage in schedule.timeline.pipeline.stages]
        partition = self.chain.partition([(spec.layers, spec.devices) for spec in specs])
        assert partition is not None
        return partition

    def improve(self, candidate: Candidate, limit_s: float) -> Candidate:
        """Let CP-SAT search for a better schedule of a partition, once."""
        if candidate.improved or candidate.proved_s >= self.best_s or limit_s <= 0:
            return candidate
        schedule, bound_s = self.recomputed.improve(
            candidate.partition, candidate.schedule, self.settings, self.clock, limit_s
        )
        if not self.task.allows_orders(schedule):
            schedule = candidate.schedule
        proved_s = max(candidate.proved_s, bound_s)
        better = Candidate(candidate.partition, schedule, proved_s, improved=True)
        self._keep(better)
        return better

    def raise_single_bound(
        self, bound_s: float, event: str, source: BoundSource = "relaxation"
    ) -> None:
        """Keep a bound on every plan with one stage a device, if the job allows no others."""
        if self.has_single_stages:
            self.found.raise_bound(bound_s, event, source)

    def proved_s(self, partition: Partition) -> float:
        """Return a bound on all schedules of a partition: infinity if none fits."""
        if partition in self.candidates:
            return self.candidates[partition].proved_s
        pipeline = place(self.problem, self.chain.specs(partition))
        if not self.allows(partition) or not is_connected(pipeline):
            return math.inf
        return self.recomputed.bound_s(partition, pipeline)

    def ranked(self) -> list[Candidate]:
        """Return the candidates, the fastest first."""
        return self.found.ranked()

    def fastest_with_shared_devices(self) -> list[Candidate]:
        """Return the candidates of which a device holds several stages; fastest first."""
        return [candidate for candidate in self.ranked() if candidate.shares_devices]

    def fastest_of_each_length(self) -> list[Candidate]:
        """Return the fastest with each number of stages, one stage a device; fastest first."""
        of_each: dict[int, Candidate] = {}
        for candidate in self.ranked():
            if not candidate.shares_devices:
                of_each.setdefault(len(candidate.partition), candidate)
        return list(of_each.values())
