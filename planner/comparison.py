"""All planners on one problem, re-scored in one simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place, place_plan
from planner.errors import InfeasibleError, PipeplanError
from planner.partition.chain import Chain
from planner.partition.planners import PLANNERS, Planner
from planner.result import Result
from planner.schedule.assignment import balanced_assignment
from planner.schedule.classics import one_by_one
from planner.schedule.heuristic import Schedule, best_classic_schedule
from planner.simulator import Timeline, simulate
from planner.solver import solve
from planner.solver_settings import DEFAULT_WORKERS
from planner.units import format_bytes
from planner.verifier import gap, replay, verify

OURS = "pipeplan"
"""The name of our own row."""
GIVEN = "this plan"
"""The name of a given plan's row."""


class Figures(NamedTuple):
    """What the simulator says of a plan.

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
class Row:
    """One planner's answer.

    Attributes:
        planner: its name.
        source: where it was published.
        stages: what it chose; None if it found nothing.
        schedule: the method that made the fastest schedule of these stages that fits memory.
        figures: of that schedule; None if the planner found nothing or no schedule fits.
        reason: why there are no figures.
        ratio: iteration time over ours; None without either.
        gap: iteration time / proven lower bound - 1; None where no bound is known.
        planning_s: seconds it took, the choice of the schedule included.
    """

    planner: str
    source: str
    stages: tuple[StageSpec, ...] | None
    schedule: str | None
    figures: Figures | None
    reason: str | None
    ratio: float | None
    gap: float | None
    planning_s: float

    @property
    def devices(self) -> int | None:
        """Number of devices in use."""
        if self.stages is None:
            return None
        return len({device for stage in self.stages for device in stage.devices})


class _Answer(NamedTuple):
    stages: tuple[StageSpec, ...] | None
    schedule: str | None = None
    timeline: Timeline | None = None
    reason: str | None = None
    lower_bound_s: float = 0.0


def compare(
    problem: Problem,
    planners: Sequence[str] | None = None,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Callable[[Row], None] | None = None,
) -> tuple[Row, ...]:
    """Plan a problem with Pipeplan and with classic planners.

    Every classic planner's stages get the fastest of the published schedules (GPipe, 1F1B, SPP's
    PE) that fits memory; all are simulated alike.

    Args:
        problem: the model, cluster and job.
        planners: names in :data:`PLANNERS`; all by default.
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
    chosen = find_planners(planners)
    chain = Chain(problem)
    classic = [_timed(partial(_classic, chain, planner)) for planner in chosen]
    # Ours starts from theirs, so that it is slower than none of them however short its time.
    search = partial(
        solve,
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        workers=workers,
        deterministic=deterministic,
        warm_starts=[row.stages for row, _ in classic if row.stages and row.timeline],
    )
    show = progress or (lambda row: None)
    ours, seconds = _timed(lambda: _found(search()))
    rows = [_row(OURS, "this project", ours, ours, seconds)]
    for planner, (answer, seconds) in zip(chosen, classic, strict=True):
        rows.append(_row(planner.name, planner.source, answer, ours, seconds))
    for row in rows:
        show(row)
    return tuple(rows)


def _found(result: Result) -> _Answer:
    """Our own plan."""
    pipeline = place_plan(result.plan)
    timeline = simulate(pipeline, result.plan.parsed_orders())
    method = result.plan.provenance.solver.rpartition("schedule by ")[2]
    if result.status == "interrupted":
        method += " (search interrupted)"
    return _answer(pipeline, timeline, method, result.lower_bound_s)


def compare_plan(
    plan: Plan,
    planners: Sequence[str] | None = None,
    *,
    progress: Callable[[Row], None] | None = None,
) -> tuple[Row, ...]:
    """Put a plan that is there already beside the classic planners', without another search.

    Args:
        plan: ratios are over its time, gaps over its bound; there are none if it does not hold.
        planners: names in :data:`PLANNERS`; all by default.
        progress: called with every classic planner's row as it is known.

    Returns:
        The plan's row, then the classic planners' in the order asked for.

    Raises:
        PipeplanError: naming every planner that is not known, or what no simulation can be made of.
    """
    chosen, show = find_planners(planners), progress or (lambda row: None)
    timeline = replay(plan)
    bound_s = 0.0 if verify(plan) else plan.predicted.lower_bound_s
    method = plan.provenance.solver.rpartition("schedule by ")[2]
    ours = _answer(timeline.pipeline, timeline, method, bound_s)
    rows = [_row(GIVEN, plan.provenance.solver, ours, ours, 0.0)]
    chain = Chain(plan.problem)
    for planner in chosen:
        answer, seconds = _timed(partial(_classic, chain, planner))
        rows.append(_row(planner.name, planner.source, answer, ours, seconds))
        show(rows[-1])
    return tuple(rows)


def find_planners(names: Sequence[str] | None) -> tuple[Planner, ...]:
    """The classic planners of these names, each once; all if no names are given.

    Raises:
        PipeplanError: naming every unknown one, and the known ones.
    """
    if names is None:
        return tuple(PLANNERS.values())
    unknown = [name for name in dict.fromkeys(names) if name not in PLANNERS]
    if unknown or not names:
        known = ", ".join(PLANNERS)
        raise PipeplanError(
            [f"planners: {name!r} is not known; choose from {known}" for name in unknown]
            or f"planners: none named; choose from {known}"
        )
    return tuple(PLANNERS[name] for name in dict.fromkeys(names))


def _timed(plan: Callable[[], _Answer]) -> tuple[_Answer, float]:
    """An answer, or why there is none, and the seconds it took."""
    start = time.perf_counter()
    try:
        answer = plan()
    except InfeasibleError as error:
        answer = _Answer(None, reason="; ".join(error.problems))
    return answer, time.perf_counter() - start


def _classic(chain: Chain, planner: Planner) -> _Answer:
    specs = chain.specs(planner.plan(chain))
    pipeline = place(chain.problem, specs)
    if not is_connected(pipeline):
        return _Answer(specs, reason="some of its neighbouring stages or replicas are not joined")
    schedule: Schedule | None = best_classic_schedule(pipeline)
    if schedule is None:
        return _Answer(specs, reason=_lack_of_memory(pipeline))
    return _answer(pipeline, schedule.timeline, schedule.method, 0.0)


def _answer(
    pipeline: PlacedPipeline, timeline: Timeline, method: str, lower_bound_s: float
) -> _Answer:
    specs = tuple(stage.spec for stage in pipeline.stages)
    return _Answer(specs, method, timeline, None, lower_bound_s)


def _lack_of_memory(pipeline: PlacedPipeline) -> str:
    """Which device lacks most even if one microbatch runs after the other."""
    timeline = simulate(pipeline, one_by_one(pipeline, balanced_assignment(pipeline)))
    peaks = timeline.peak_memory_bytes
    worst = max(peaks, key=lambda device: peaks[device] - pipeline.capacity_bytes(device))
    stages = ", ".join(map(str, pipeline.stages_on[worst]))
    return (
        f"does not fit: stage {stages} needs {format_bytes(peaks[worst])} on {worst!r} with one "
        f"microbatch in flight, it has {format_bytes(pipeline.capacity_bytes(worst))}"
    )


def _row(name: str, source: str, found: _Answer, ours: _Answer, planning_s: float) -> Row:
    figures = None if found.timeline is None else _figures(found.timeline)
    ratio = None
    if figures is not None and ours.timeline is not None and ours.timeline.iteration_time_s > 0:
        ratio = figures.iteration_time_s / ours.timeline.iteration_time_s
    return Row(
        planner=name,
        source=source,
        stages=found.stages,
        schedule=found.schedule,
        figures=figures,
        reason=found.reason,
        ratio=ratio,
        gap=None if figures is None else gap(figures.iteration_time_s, ours.lower_bound_s),
        planning_s=planning_s,
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
