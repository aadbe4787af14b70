"""All planners on one problem, re-scored in one simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from planner.verification.verify import collector_paused

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
    stages: tuple[StageSpec, ...] | None = None
    schedule: str | None = None
    orders: Orders | None = None
    figures: Figures | None = None
    reason: str | None = None
    ratio: float | None = None
    gap: float | None = None
    planning_s: float = 0.0
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
    begin, ours, bound_s = time.perf_counter(), ComparisonRow(OURS, "this project"), 0.0
    try:
        result = solve(
            problem,
            time_limit_s=time_limit_s,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
        )
    except InfeasibleError as error:
        ours = replace(ours, reason="; ".join(error.problems))
    else:
        ours, bound_s = _with_plan(ours, result), result.lower_bound_s
    rows: list[ComparisonRow] = []

    def add(row: ComparisonRow, begin: float) -> None:
        seconds = time.perf_counter() - begin
        rows.append(_compared(row, ours.time_s, bound_s, seconds))
        show(rows[-1])

    add(ours, begin)
    sizes = _sizes(problem)
    with collector_paused():
        for planner in chosen:
            begin = time.perf_counter()
            add(_best_of_sizes(sizes, planner), begin)
    return PlannerComparison(problem, tuple(rows))


def _with_plan(row: ComparisonRow, result: Result) -> ComparisonRow:
    """Return the row of our own plan."""
    orders, method = result.plan.parsed_orders(), result.plan.provenance.solver
    method = method.rpartition("schedule by ")[2]
    if result.status == "interrupted":
        method += " (search interrupted)"
    timeline = simulate(place_plan(result.plan), orders)
    return _scheduled(row, timeline, orders, method, result.plan.tensor_parallel)


def _scheduled(
    row: ComparisonRow,
    timeline: Timeline,
    orders: Orders,
    method: str,
    parallel: TensorParallel | None,
) -> ComparisonRow:
    return replace(
        row,
        stages=tuple(stage.spec for stage in timeline.pipeline.stages),
        schedule=method,
        orders=orders,
        figures=_figures(timeline),
        parallel=parallel,
    )


def _compared(
    row: ComparisonRow, ours_s: float, bound_s: float, planning_s: float
) -> ComparisonRow:
    """Return a row with its ratio to our time and its gap to our bound, if it has figures."""
    if row.figures is None:
        return replace(row, planning_s=planning_s)
    ratio = row.time_s / ours_s if 0 < ours_s < math.inf else None
    return replace(row, planning_s=planning_s, ratio=ratio, gap=gap(row.time_s, bound_s))


_Sizes = list[tuple[ScheduledBaselines, TensorParallel | None]]
"""The baselines' schedules for each size of tensor-parallel groups, and the groups."""


def _sizes(problem: Problem) -> _Sizes:
    """Return the baselines' schedules for each size of groups that the job allows."""
    is_one = problem.has_groups or problem.job.tensor_parallel == 1
    rows = [Variant(problem, problem, None)] if is_one else variants_of(problem)
    return [(ScheduledBaselines(row.problem), row.parallel) for row in rows]


def _best_of_sizes(sizes: _Sizes, planner: Baseline) -> ComparisonRow:
    """Return a planner's fastest answer over all sizes of groups, or why there is none.

    Stages without a schedule that fits are an answer too, if no size has a better one.
    """
    best = none = ComparisonRow(planner.name, planner.source)
    reasons: list[str] = []
    for schedules, parallel in sizes:
        try:
            found = schedules.best(planner, best.time_s)
        except UnscheduledError as error:
            if best is none:
                reason = "; ".join(error.problems)
                best = replace(none, stages=error.stages, reason=reason, parallel=parallel)
        except InfeasibleError as error:
            reasons += error.problems
        else:
            if found is not None:
                best = _scheduled(none, found.timeline, found.orders, found.method, parallel)
    return (
        replace(none, reason="; ".join(InfeasibleError(reasons).problems)) if best is none else best
    )


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


def _figures(timeline: Timeline) -> Figures:
    peaks = timeline.peak_memory_bytes
    capacity = timeline.pipeline.capacity_bytes
    return Figures(
        timeline.iteration_time_s,
        timeline.bubble,
        max(peaks.values()),
        max(peak / capacity(device) for device, peak in peaks.items()),
    )
