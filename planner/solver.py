"""The portfolio: candidate partitions are scheduled, CP-SAT improves both and proves a bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.artifacts.plan import Provenance
from planner.artifacts.problem import Problem
from planner.assemble import assemble_plan, version
from planner.costs.placement import PlacedPipeline, is_connected, place
from planner.errors import PipeplanError
from planner.feasibility import explain_infeasible
from planner.partition.candidates import candidate_partitions
from planner.partition.chain import Chain, Partition
from planner.partition.division import Division
from planner.partition.local_search import neighbours
from planner.partition.relaxation import longest_plan_s, work_bound_s
from planner.result import HistoryRow, Result, Status
from planner.schedule.heuristic import Schedule
from planner.schedule.recomputed import RecomputedSchedules
from planner.solver_settings import Clock, Settings
from planner.verifier import require_valid

if TYPE_CHECKING:
    from planner.partition.exact.search import PartitionSearch

logger = logging.getLogger(__name__)

OPTIMALITY_TOLERANCE = 1e-4
"""Rounding to ticks alone costs up to this much; a smaller gap counts as proved optimal."""
MAX_DEVICES_FOR_EXACT_MODEL = 24
"""Beyond this the partition model is too large to help; the work bound and candidates stand."""
SECONDS_A_STAGE = 1e-4
SECONDS_AN_OPERATION = 1e-4
"""What placing a stage and scheduling an operation count in deterministic time."""
Progress = Callable[[HistoryRow], None]


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    workers: int = 2,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Find the fastest plan for a problem and bound how far it can be from the best.

    Args:
        problem: the model, cluster and job.
        time_limit_s: stop after this long with the best plan so far; seconds of CP-SAT's
            deterministic time in deterministic mode.
        gap_limit: stop once iteration time / lower bound - 1 is at most this.
        seed: of the solver's searches.
        workers: threads of the solver.
        deterministic: one worker and a deterministic limit: the same plan on every machine.
        progress: called with every new incumbent or bound.

    Raises:
        InfeasibleError: if no plan fits; the message says which constraint binds.
        PipeplanError: if a setting is out of range.
    """
    check_settings(time_limit_s, gap_limit, seed, workers)
    settings = Settings(seed, workers, deterministic)
    clock = Clock(time_limit_s, deterministic)
    search = _Search(problem, settings, clock, gap_limit, progress or (lambda row: None))
    try:
        search.schedule_candidates()
        search.find_any()
        search.descend()
        search.improve_best()
        search.search_partitions()
    except KeyboardInterrupt:
        clock.stop()
    return search.result(_limit(time_limit_s, deterministic))


def check_settings(time_limit_s: float, gap_limit: float, seed: int, workers: int) -> None:
    """What :func:`solve` asks of its settings.

    Raises:
        PipeplanError: naming every setting that is out of range.
    """
    problems = []
    if not time_limit_s > 0:
        problems.append(f"time_limit_s: {time_limit_s} is not a positive number of seconds")
    if not gap_limit >= 0:
        problems.append(f"gap_limit: {gap_limit} is not a number of at least 0, such as 0.01")
    if not 0 <= seed < 2**31:
        problems.append(f"seed: {seed} is not a whole number from 0 to {2**31 - 1}")
    if not 1 <= workers <= 1024:
        problems.append(f"workers: {workers} is not a whole number from 1 to 1024")
    if problems:
        raise PipeplanError(problems)


def _limit(time_limit_s: float, deterministic: bool) -> str:
    return f"{'deterministic' if deterministic else 'wall'} {time_limit_s:g} s"


@dataclass(frozen=True)
class _Candidate:
    """A partition with its best schedule so far.

    ``partition`` recomputes nothing; the schedule's pipeline says what is recomputed.
    ``proved_s`` bounds every schedule of these stages, whatever they recompute.
    """

    partition: Partition
    schedule: Schedule
    proved_s: float
    improved: bool = False


@dataclass
class _Search:
    problem: Problem
    settings: Settings
    clock: Clock
    gap_limit: float
    progress: Progress
    bound_s: float = 0.0
    history: list[HistoryRow] = field(default_factory=list)
    candidates: dict[Partition, _Candidate] = field(default_factory=dict)
    best: _Candidate | None = None
    tried: int = 0
    infeasible: bool = False
    """Whether it is proved that nothing fits."""

    def __post_init__(self) -> None:
        self.chain = Chain(self.problem)
        self.recomputed = RecomputedSchedules(self.chain)
        limit = self.problem.job.max_stages or self.chain.length
        self.max_stages = min(limit, self.chain.length, len(self.problem.cluster.devices))

    # --- incumbents and bounds ---------------------------------------------------------------

    def consider(self, partition: Partition) -> _Candidate | None:
        """Schedule a partition quickly; None if it does not fit or cannot beat the incumbent."""
        if partition in self.candidates:
            return self.candidates[partition]
        pipeline = place(self.problem, self.chain.specs(partition))
        if not is_connected(pipeline):
            return None
        return self._schedule(partition, pipeline)

    def _schedule(self, partition: Partition, pipeline: PlacedPipeline) -> _Candidate | None:
        self.tried += 1
        self.clock.spend(SECONDS_AN_OPERATION * pipeline.microbatches * len(partition))
        schedule = self.recomputed.best(partition, pipeline)
        if schedule is None:
            return None
        bound_s = self.recomputed.bound_s(partition, pipeline)
        candidate = _Candidate(partition, schedule, bound_s)
        self.candidates[partition] = candidate
        self._offer(candidate)
        return candidate

    def _offer(self, candidate: _Candidate) -> None:
        if self.best is None or (
            candidate.schedule.iteration_time_s < self.best.schedule.iteration_time_s * (1 - 1e-12)
        ):
            self.best = candidate
            self._record(f"plan: {len(candidate.partition)} stages, {candidate.schedule.method}")

    def raise_bound(self, bound_s: float, event: str) -> None:
        """A new bound on every plan."""
        if bound_s > self.bound_s * (1 + 1e-12):
            self.bound_s = bound_s
            self._record(f"bound: {event}")

    def _record(self, event: str) -> None:
        if self.best is None:
            return
        time_s = self.best.schedule.iteration_time_s
        row = HistoryRow(self.clock.elapsed_s, time_s, min(self.bound_s, time_s), event)
        self.history.append(row)
        logger.info("%8.2f s  %.6f s  bound %.6f s  %s", *row)
        self.progress(row)

    def is_done(self) -> bool:
        """Whether time is up or the gap is small enough."""
        if self.clock.left_s <= 0:
            return True
        if self.best is None:
            return self.infeasible
        return self.best.schedule.iteration_time_s <= self.bound_s * (1 + self.gap_limit)

    # --- the steps ---------------------------------------------------------------------------

    def schedule_candidates(self) -> None:
        """Partitions from the dynamic program in order of their bound, while it is promising."""
        pool = []
        for partition in candidate_partitions(self.chain, self.max_stages):
            pipeline = place(self.problem, self.chain.specs(partition))
            self.clock.spend(SECONDS_A_STAGE * len(partition))
            if is_connected(pipeline) and not self.recomputed.fits_never(partition, pipeline):
                promise_s = self.recomputed.promise_s(partition, pipeline)
                pool.append((promise_s, partition, pipeline))
            if (pool and self.clock.left_s < 0.8 * self._limit_s()) or self.clock.left_s <= 0:
                break
        for promise_s, partition, pipeline in sorted(pool, key=lambda row: row[0]):
            if self.best is not None and (
                promise_s >= self.best.schedule.iteration_time_s
                or self.clock.left_s < 0.6 * self._limit_s()
            ):
                break
            self._schedule(partition, pipeline)
        self.raise_bound(work_bound_s(self.chain), "total work")

    def find_any(self) -> None:
        """Where no candidate fits: any division of the layers that does, or the model's."""
        if self.best is not None:
            return
        self._divide()
        if self.best is not None or self.infeasible or not self._model_applies():
            return
        search = self._partition_search(None, longest_plan_s(self.chain, self.max_stages))
        while self.best is None and not self.is_done():
            found = search.next(search.horizon_s, self.clock.left_s)
            for partition in found.partitions:
                self.consider(partition)
                search.exclude(partition, self._proved_s(partition))
            if found.is_exhausted:
                self.infeasible = all(math.isinf(s) for s in search.excluded.values()) and (
                    self.problem.job.max_stages_per_device == 1
                )
                return

    def _divide(self) -> None:
        """A division of the layers that fits memory, if there is one."""
        division = Division(self.chain)
        partition = division.partition()
        if partition is not None:
            self.consider(partition)
        else:
            self.infeasible = division.is_exact and self.problem.job.max_stages_per_device == 1

    def _partition_search(self, known: Partition | None, horizon_s: float) -> PartitionSearch:
        from planner.partition.exact.search import PartitionSearch

        return PartitionSearch(
            self.chain, self.max_stages, self.settings, self.clock, known, horizon_s
        )

    def _proved_s(self, partition: Partition) -> float:
        """What is proved of all schedules of a partition: infinity if none fits."""
        if partition in self.candidates:
            return self.candidates[partition].proved_s
        pipeline = place(self.problem, self.chain.specs(partition))
        if not is_connected(pipeline):
            return math.inf
        return self.recomputed.bound_s(partition, pipeline)

    def descend(self, starts: int = 4, share: float = 0.35) -> None:
        """Local search from the best partitions, judged by their schedules."""
        stop_s = (1 - share) * self.clock.left_s
        ranked = sorted(self.candidates.values(), key=lambda c: c.schedule.iteration_time_s)
        single = [candidate for candidate in ranked if not _shares_devices(candidate.partition)]
        for start in single[:starts]:
            current: _Candidate | None = start
            while current is not None and self.clock.left_s > stop_s and not self.is_done():
                current = self._better_neighbour(current, stop_s)

    def _better_neighbour(self, current: _Candidate, stop_s: float) -> _Candidate | None:
        """The first neighbour with a faster schedule; hopeless bounds are skipped."""
        for partition in neighbours(self.chain, current.partition, self.max_stages):
            if self.clock.left_s <= stop_s:
                return None
            if partition in self.candidates:
                continue
            self.clock.spend(SECONDS_A_STAGE * len(partition))
            pipeline = place(self.problem, self.chain.specs(partition))
            if not is_connected(pipeline):
                continue
            if self.recomputed.promise_s(partition, pipeline) >= current.schedule.iteration_time_s:
                continue
            found = self._schedule(partition, pipeline)
            if found and found.schedule.iteration_time_s < current.schedule.iteration_time_s:
                return found
        return None

    def _limit_s(self) -> float:
        return self.clock.left_s + self.clock.elapsed_s

    def improve_best(self, count: int = 3, share: float = 0.25) -> None:
        """CP-SAT on the schedules of the most promising partitions."""
        limit_s = share * max(self.clock.left_s, 0) / count
        ranked = sorted(self.candidates.values(), key=lambda c: c.schedule.iteration_time_s)
        for candidate in ranked[:count]:
            if self.is_done():
                return
            self.improve(candidate, limit_s)

    def improve(self, candidate: _Candidate, limit_s: float) -> None:
        """Search for a better schedule of a partition, once."""
        assert self.best is not None
        hopeless = candidate.proved_s >= self.best.schedule.iteration_time_s
        if candidate.improved or hopeless or limit_s <= 0:
            return
        schedule, bound_s = self.recomputed.improve(
            candidate.partition, candidate.schedule, self.settings, self.clock, limit_s
        )
        proved_s = max(candidate.proved_s, bound_s)
        better = _Candidate(candidate.partition, schedule, proved_s, improved=True)
        self.candidates[candidate.partition] = better
        self._offer(better)

    def search_partitions(self) -> None:
        """Partitions in order of their bound, each scheduled; raises the bound on every plan."""
        if self.best is None or self.is_done() or not self._model_applies():
            return
        search = self._partition_search(self.best.partition, self.best.schedule.iteration_time_s)
        for known in self.candidates.values():
            if known.improved and not _shares_devices(known.partition):
                search.exclude(known.partition, known.proved_s)
        share = 0.4
        while not self.is_done():
            limit_s = max(share * self.clock.left_s, min(1.0, self.clock.left_s))
            found = search.next(self.best.schedule.iteration_time_s, limit_s)
            for partition in found.partitions:
                self.consider(partition)
            self._raise_bound_of_model(found.bound_s, "partition model")
            if found.is_exhausted:
                self._close_gap(search)
                return
            if found.partitions:
                self._finish_partition(search, found.partitions[-1])
            else:
                share = 1.0  # Nothing better in this time: the rest goes into the bound.

    def _finish_partition(self, search: PartitionSearch, partition: Partition) -> None:
        """Schedule the model's best partition as well as we can and go on without it."""
        if partition in self.candidates:
            self.improve(self.candidates[partition], 0.3 * self.clock.left_s)
        search.exclude(partition, self._proved_s(partition))
        self._raise_bound_of_model(search.bound_s, "schedules of the best partitions")

    def _close_gap(self, search: PartitionSearch) -> None:
        """Only scheduled partitions are left: prove more about the one with the weakest bound."""
        open_ = [self.candidates[p] for p in search.excluded if p in self.candidates]
        while open_ and not self.is_done():
            weakest = min(open_, key=lambda candidate: candidate.proved_s)
            before_s = weakest.proved_s
            open_.remove(weakest)
            self.improve(replace(weakest, improved=False), 0.6 * self.clock.left_s)
            again = self.candidates[weakest.partition]
            search.exclude(again.partition, again.proved_s)
            self._raise_bound_of_model(search.bound_s, "schedules of the best partitions")
            if again.proved_s > before_s:
                open_.append(again)

    def _raise_bound_of_model(self, bound_s: float, event: str) -> None:
        """The partition model knows one stage a device only; its bound covers no other plans."""
        if self.problem.job.max_stages_per_device == 1:
            self.raise_bound(bound_s, event)

    def _model_applies(self) -> bool:
        return len(self.problem.cluster.devices) <= MAX_DEVICES_FOR_EXACT_MODEL

    # --- the end -----------------------------------------------------------------------------

    def result(self, limit: str) -> Result:
        """The verified plan of the incumbent."""
        if self.best is None:
            if self.clock.is_stopped:
                raise PipeplanError("interrupted before any plan was found")
            raise explain_infeasible(self.chain, is_proved=self.infeasible)
        schedule = self.best.schedule
        bound_s = min(self.bound_s, schedule.iteration_time_s)
        plan = assemble_plan(schedule.timeline, schedule.orders, bound_s, self._provenance(limit))
        require_valid(plan)
        return Result(self._status(), plan, bound_s, tuple(self.history), self.tried)

    def _status(self) -> Status:
        assert self.best is not None
        tolerance = min(self.gap_limit, OPTIMALITY_TOLERANCE)
        if self.best.schedule.iteration_time_s <= self.bound_s * (1 + tolerance):
            return "optimal"
        return "interrupted" if self.clock.is_stopped else "feasible"

    def _provenance(self, limit: str) -> Provenance:
        assert self.best is not None
        per_device = self.problem.job.max_stages_per_device
        return Provenance(
            pipeplan=version("pipeplan"),
            ortools=version("ortools"),
            seed=self.settings.seed,
            workers=1 if self.settings.deterministic else self.settings.workers,
            limit=limit,
            solver=f"partition portfolio, schedule by {self.best.schedule.method}",
            bound_covers=(
                f"every plan that cuts the chain of layers, with up to {per_device} "
                f"stage{'s' if per_device > 1 else ''} a device, whole backwards and "
                + ("any layers recomputed" if self.problem.job.recompute else "no recompute")
            ),
        )


def _shares_devices(partition: Partition) -> bool:
    """Whether a device holds several stages."""
    devices = [device for stage in partition for device in stage.devices]
    return len(set(devices)) < len(devices)
