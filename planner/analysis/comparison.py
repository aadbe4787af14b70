"""All planners on one problem, re-scored in one simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, overload

from planner.assembly import plan_by_hand
from planner.baselines import BASELINES
from planner.baselines.layers import Baseline
from planner.baselines.scheduled import ScheduledBaselines, UnscheduledError
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place, place_plan
from planner.errors import InfeasibleError, PipeplanError
from planner.job import WITHOUT_GROUPS
from planner.plan.operations import Orders
from planner.plan.plan import Plan, gap
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.plan.unsupported import require_decided, require_without
from planner.search.result import Result
from planner.search.settings import DEFAULT_WORKERS
from planner.search.solve import solve
from planner.search.variants import Variant, variants_of
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.units import format_seconds

OURS = "pipeplan"
"""The name of our own row."""


class Figures(NamedTuple):
    """The simulated figures of a plan.

    Attributes:
        iteration_time_s: of one iteration.
        bubble: idle share of the devices used.
        peak_memory_bytes: the most any device holds at any moment.
        peak_memory_share: the largest share any device uses of its capacity.
    """

    iteration_time_s: float
    bubble: float
    peak_memory_bytes: int
    peak_memory_share: float


@dataclass(frozen=True)
class ComparisonRow:
    """One planner's answer.

    Attributes:
        planner: its name.
        source: where it was published.
        stages: what it chose, cut into two chunks a device where that is faster; None if it found
            nothing.
        schedule: the method that made the fastest schedule of these stages that fits memory.
        orders: that schedule; None without figures.
        figures: of that schedule; None if the planner found nothing or no schedule fits.
        reason: why there are no figures.
        ratio: iteration time over ours; None without either.
        gap: iteration time / proven lower bound - 1; None where no bound is known.
        planning_s: seconds it took, the choice of the schedule included.
        parallel: tensor-parallel groups that its stages name instead of devices; None: devices.
    """

    planner: str
    source: str
    stages: tuple[StageSpec, ...] | None
    schedule: str | None
    orders: Orders | None
    figures: Figures | None
    reason: str | None
    ratio: float | None
    gap: float | None
    planning_s: float
    parallel: TensorParallel | None = None

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of devices that hold a replica of a stage together, ascending."""
        return (1,) if self.parallel is None else self.parallel.degrees

    @property
    def time_s(self) -> float:
        """Iteration time; infinity without figures."""
        return math.inf if self.figures is None else self.figures.iteration_time_s

    @property
    def devices(self) -> int | None:
        """Number of devices in use."""
        if self.stages is None:
            return None
        used = {name for stage in self.stages for name in stage.devices}
        if self.parallel is None:
            return len(used)
        return sum(len(row.devices) for row in self.parallel.groups if row.name in used)


@dataclass(frozen=True, repr=False)
class PlannerComparison(Sequence[ComparisonRow]):
    """The rows of a comparison of planners, ours first.

    Attributes:
        problem: that they planned.
        rows: of the planners.
    """

    problem: Problem
    rows: tuple[ComparisonRow, ...]

    @overload
    def __getitem__(self, index: int) -> ComparisonRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ComparisonRow, ...]: ...

    def __getitem__(self, index: int | slice) -> ComparisonRow | tuple[ComparisonRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Return the iteration time of every planner, in a line."""
        times = (
            f"{row.planner} {format_seconds(row.time_s) if row.figures else 'no plan'}"
            for row in self.rows
        )
        return f"<PlannerComparison: {', '.join(times)}>"

    @property
    def title(self) -> str:
        """The heading of a table of the rows."""
        problem = self.problem
        return f"{problem.graph.name} on {problem.cluster.name}"


class _Answer(NamedTuple):
    stages: tuple[StageSpec, ...] | None
    schedule: str | None = None
    orders: Orders | None = None
    timeline: Timeline | None = None
    reason: str | None = None
    lower_bound_s: float = 0.0
    parallel: TensorParallel | None = None


def compare(
    problem: Problem,
    planners: Sequence[str] | None = None,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Callable[[ComparisonRow], None] | None = None,
) -> PlannerComparison:
    """Plan a problem with Pipeplan and with classic planners.

    Our row is what :func:`planner.solve` finds with the same settings: its search knows nothing of
    the classic planners' stages. Each of theirs gets the fastest published schedule that the job
    allows, with two chunks a device too. Where memory is short, layers are recomputed and
    microbatches in flight limited. Of tensor-parallel groups, the fastest size is a planner's
    answer.

    Args:
        problem: the model, cluster and job.
        planners: names in :data:`BASELINES`; all by default.
        time_limit_s: of Pipeplan's search; the classic planners take the time they take.
        seed: of the search.
        workers: its threads.
        deterministic: the same rows on every machine, but for ``planning_s``.
        progress: called with every row as it is known.

    Returns:
        Our row, then the classic planners' in the order asked for.

    Raises:
        PipeplanError: naming every planner that is not known, or a setting out of range.
    """
    require_decided(problem.job, "compare")
    require_without(problem.job, "compare", ["shard_parameters", "offload"])
    chosen, show = find_planners(planners), progress or (lambda row: None)
    search = partial(
        solve,
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        workers=workers,
        deterministic=deterministic,
    )
    ours, seconds = _timed(lambda: _found(search()))
    rows = [_row(OURS, "this project", ours, ours, seconds)]
    show(rows[0])
    sizes = _sizes(problem)
    for planner in chosen:
        answer, seconds = _timed(partial(_best_of_sizes, sizes, planner))
        rows.append(_row(planner.name, planner.source, answer, ours, seconds))
        show(rows[-1])
    return PlannerComparison(problem, tuple(rows))


class _Size(NamedTuple):
    """The baselines' schedules for one size of groups.

    Attributes:
        schedules: of the problem in which groups are the devices.
        parallel: the groups; None: single devices.
    """

    schedules: ScheduledBaselines
    parallel: TensorParallel | None


def _sizes(problem: Problem) -> list[_Size]:
    """Return the baselines' schedules for each size of groups that the job allows."""
    is_one = problem.has_groups or problem.job.tensor_parallel == 1
    rows = [Variant(problem, problem, None)] if is_one else variants_of(problem)
    return [_Size(ScheduledBaselines(row.problem), row.parallel) for row in rows]


def _best_of_sizes(sizes: Sequence[_Size], planner: Baseline) -> _Answer:
    """Return a planner's fastest answer over all sizes of groups.

    Raises:
        InfeasibleError: if it finds no stages for any of them.
    """
    best: _Answer | None = None
    reasons: list[str] = []
    for size in sizes:
        try:
            answer = _classic(size.schedules, planner, _answered_s(best))
        except InfeasibleError as error:
            reasons += error.problems
            continue
        if answer is not None and (best is None or _answered_s(answer) < _answered_s(best)):
            best = answer._replace(parallel=size.parallel)
    if best is None:
        raise InfeasibleError(reasons)
    return best


def _answered_s(answer: _Answer | None) -> float:
    """Return the time of an answer; infinity without a schedule."""
    if answer is None or answer.timeline is None:
        return math.inf
    return answer.timeline.iteration_time_s


def _found(result: Result) -> _Answer:
    """Return the row of our own plan."""
    pipeline, orders = place_plan(result.plan), result.plan.parsed_orders()
    timeline = simulate(pipeline, orders)
    method = result.plan.provenance.solver.rpartition("schedule by ")[2]
    if result.status == "interrupted":
        method += " (search interrupted)"
    answer = _answer(timeline, orders, method, result.lower_bound_s)
    return answer._replace(parallel=result.plan.tensor_parallel)


def find_planners(names: Sequence[str] | None) -> tuple[Baseline, ...]:
    """Return the baselines of these names, each once; all if no names are given.

    Raises:
        PipeplanError: naming every unknown one, and the known ones.
    """
    if names is None:
        return tuple(BASELINES.values())
    unknown = [name for name in dict.fromkeys(names) if name not in BASELINES]
    if unknown or not names:
        known = ", ".join(BASELINES)
        raise PipeplanError(
            [f"planners: {name!r} is not known; choose from {known}" for name in unknown]
            or f"planners: none named; choose from {known}"
        )
    return tuple(BASELINES[name] for name in dict.fromkeys(names))


def _timed(plan: Callable[[], _Answer]) -> tuple[_Answer, float]:
    """Return an answer, or why there is none, and the seconds it took."""
    start = time.perf_counter()
    try:
        answer = plan()
    except InfeasibleError as error:
        answer = _Answer(None, reason="; ".join(error.problems))
    return answer, time.perf_counter() - start


def _classic(schedules: ScheduledBaselines, planner: Baseline, below_s: float) -> _Answer | None:
    """Return a planner's answer; None if it is not faster than ``below_s``."""
    try:
        schedule = schedules.best(planner, below_s)
    except UnscheduledError as error:
        return _Answer(error.stages, reason="; ".join(error.problems))
    if schedule is None:
        return None
    return _answer(schedule.timeline, schedule.orders, schedule.method, 0.0)


def _answer(timeline: Timeline, orders: Orders, method: str, lower_bound_s: float) -> _Answer:
    specs = tuple(stage.spec for stage in timeline.pipeline.stages)
    return _Answer(specs, method, orders, timeline, None, lower_bound_s)


def best_baseline(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the fastest row of a baseline; None if none has a plan."""
    found = [row for row in rows if row.planner in BASELINES and row.figures is not None]
    return min(found, key=lambda row: row.time_s, default=None)


def plan_of_row(problem: Problem, row: ComparisonRow) -> Plan:
    """Return a row's stages and schedule as a plan without a bound.

    Raises:
        PipeplanError: if the row has none.
    """
    if row.stages is None or row.orders is None:
        raise PipeplanError(f"{row.planner} has no plan: {row.reason}")
    solver = f"{row.planner}, schedule by {row.schedule}"
    if row.parallel is not None:
        on_groups = grouped_problem(problem, row.parallel)
        plan = plan_by_hand(place(on_groups, row.stages), row.orders, solver)
        return plan.of_problem(problem, row.parallel)
    if not problem.has_groups:
        problem = replace(problem, job=problem.job.model_copy(update=WITHOUT_GROUPS))
    return plan_by_hand(place(problem, row.stages), row.orders, solver)


def _row(name: str, source: str, found: _Answer, ours: _Answer, planning_s: float) -> ComparisonRow:
    figures = None if found.timeline is None else _figures(found.timeline)
    ratio = None
    if figures is not None and ours.timeline is not None and ours.timeline.iteration_time_s > 0:
        ratio = figures.iteration_time_s / ours.timeline.iteration_time_s
    return ComparisonRow(
        planner=name,
        source=source,
        stages=found.stages,
        schedule=found.schedule,
        orders=found.orders,
        figures=figures,
        reason=found.reason,
        ratio=ratio,
        gap=None if figures is None else gap(figures.iteration_time_s, ours.lower_bound_s),
        planning_s=planning_s,
        parallel=found.parallel,
    )


def _figures(timeline: Timeline) -> Figures:
    peaks = timeline.peak_memory_bytes
    capacity = timeline.pipeline.capacity_bytes
    return Figures(
        timeline.iteration_time_s,
        timeline.bubble,
        max(peaks.values()),
        max(peak / capacity(device) for device, peak in peaks.items()),
    )
