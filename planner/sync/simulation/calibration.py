"""Calibration of a simulated world: compute times and links from a measured trace.

For each group, the trace has the last member's arrival and the times at which members continued.
Between them are the scheduler's round trip, the collective's overhead, its latency and its bytes.
Groups of one have only the round trip. Groups of several sizes separate latency and bandwidth; if
all have one size, both figures are scaled by the same factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncStep, SyncTrace
from planner.sync.simulation.world import LinkCost, World
from planner.sync.strategies import (
    AdPsgdOptions,
    AllReduceOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    options_of,
)

WARM_UP = 1
"""Iterations of each worker that are left out: they connect and allocate."""
TOGETHER_S = 0.02
"""Members of a group continue within this time of each other: on busy hosts they do so some
milliseconds apart, and real clocks agree to about one."""
Shape = tuple[int, int, bool]
"""A shape of collective: its bytes, its members, and whether these are on several nodes."""


def calibrated(world: World, measured: SyncTrace | Mapping[str, Any]) -> World:
    """Return the world with measured figures instead of predicted ones.

    Compute times: each worker's median, as a factor on the times of the pipeline ranks, which keep
    their proportions, and the usual deviation from it. Links: those of the all-reduces in the
    trace; links that no group crossed keep their figures.

    Args:
        world: predicted.
        measured: a trace, or the plain data of one.

    Raises:
        PipeplanError: if the trace is of other pipelines, or of a strategy whose communication
            overlaps computation, so that it cannot be measured.
    """
    trace = measured if isinstance(measured, SyncTrace) else SyncTrace.parse(measured)
    options = options_of(trace.sync)
    _require_measurable(options, trace.sync.strategy)
    _require_same_ranks(world, trace)
    has_scheduler = not isinstance(options, AllReduceOptions)
    world = _with_compute_times(world, trace, steps_inside=has_scheduler)
    # A semi-decentralised group may stay open after its last member: the quickest ones did not.
    share = 0.1 if isinstance(options, SemiDecentralizedOptions) else 0.5
    found = {shape: float(np.quantile(row, share)) for shape, row in _durations(world, trace)}
    alone_s = [seconds for (_, members, _), seconds in found.items() if members == 1]
    if has_scheduler and alone_s:
        world = replace(world, scheduler_round_trip_s=median(alone_s))
    fixed_s = world.collective_overhead_s
    fixed_s += world.scheduler_round_trip_s if has_scheduler else 0.0
    links = []
    for crosses, link in ((False, world.within), (True, world.between)):
        rows = {
            (bytes_, members): max(seconds - fixed_s, 1e-9)
            for (bytes_, members, across), seconds in found.items()
            if members > 1 and across == crosses
        }
        links.append(_fitted(link, rows) if rows else link)
    return world.at_links(*links)


def _require_measurable(options: Options, name: str) -> None:
    """Refuse traces of strategies whose collectives do not begin when their last member asks."""
    match options:
        case AllReduceOptions(overlap=False) | AdPsgdOptions(pairs="matching"):
            return
        case PartialAllReduceOptions(overlap=False) | SemiDecentralizedOptions(overlap=False):
            return
    raise PipeplanError(
        f"sync.strategy: a trace of {name} does not show how long its communication takes, which "
        "overlaps computation or queues at servers; measure all_reduce:overlap=false, "
        "partial_all_reduce or semi_decentralized"
    )


def _require_same_ranks(world: World, trace: SyncTrace) -> None:
    if len(trace.parameter_bytes) != len(world.ranks):
        raise PipeplanError(
            f"parameter_bytes: of {len(trace.parameter_bytes)} pipeline ranks, the plan's "
            f"pipelines have {len(world.ranks)}; give the trace of a run of this plan"
        )
    if world.links is not None and len(trace.workers) != world.workers:
        raise PipeplanError(
            f"workers: {len(trace.workers)} in the trace, the plan has {world.workers} pipelines; "
            "give the trace of a run of this plan"
        )
    if not any(map(_counted, trace.workers)):
        raise PipeplanError("workers: no worker has done two iterations; measure more of them")


def _counted(rows: Sequence[SyncStep]) -> list[SyncStep]:
    return [row for row in rows if row.iteration > WARM_UP and row.compute_s > 0]


def _with_compute_times(world: World, trace: SyncTrace, *, steps_inside: bool) -> World:
    """Scale the pipeline ranks to the median worker, and set a factor for each worker.

    Args:
        world: predicted.
        trace: measured.
        steps_inside: whether the measured computation includes the optimizer step.
    """
    factors: list[float | None] = []
    jitters_s = []
    for rows in map(_counted, trace.workers):
        of_first_s = [row.compute_s for row in rows if not row.pipeline_rank]
        if of_first_s:
            usual_s = median(of_first_s)
            # Pauses hardly change the median distance, 0.6745 deviations of a normal distribution.
            jitters_s.append(median(abs(time_s - usual_s) for time_s in of_first_s) / 0.6745)
        ratios = []
        for row in rows:
            rank = world.ranks[row.pipeline_rank]
            step_s = rank.optimizer_s if steps_inside else 0.0
            ratios.append(row.compute_s / (rank.last_backward_s + step_s))
        factors.append(median(ratios) if ratios else None)
    usual = median(factor for factor in factors if factor is not None)
    return replace(
        world,
        workers=len(trace.workers),
        ranks=tuple(
            replace(rank.at_speed(usual), parameter_bytes=bytes_)
            for rank, bytes_ in zip(world.ranks, trace.parameter_bytes, strict=True)
        ),
        pipelines_per_node=trace.pipelines_per_node,
        slowdown=tuple((factor or usual) / usual for factor in factors),
        jitter_s=median(jitters_s) if jitters_s else 0.0,
    )


def _durations(world: World, trace: SyncTrace) -> list[tuple[Shape, list[float]]]:
    """Return the seconds from the last member's request to the average, by shape.

    Raises:
        PipeplanError: if most rows of groups are not matched by rows of all other members.
    """
    rows_of: defaultdict[tuple[int, tuple[int, ...]], list[tuple[float, int, SyncStep]]]
    rows_of = defaultdict(list)
    for worker, rows in enumerate(trace.workers):
        for row in rows:
            if row.iteration > WARM_UP:
                rows_of[row.pipeline_rank, row.members].append((row.end_s, worker, row))
    found: defaultdict[Shape, list[float]] = defaultdict(list)
    apart: list[SyncStep] = []
    total = 0
    for (key, members), theirs in rows_of.items():
        shape = world.ranks[key].parameter_bytes, len(members), world.crosses(members)
        met: dict[int, SyncStep] = {}
        theirs.sort(key=lambda one: one[:2])
        for end_s, worker, row in theirs:
            if met and (worker in met or end_s - next(iter(met.values())).end_s > TOGETHER_S):
                apart += met.values()
                met = {}
            met[worker] = row
            if len(met) == len(members):
                asked_s = max(one.asked_s for one in met.values())
                found[shape].append(fmean(one.end_s for one in met.values()) - asked_s)
                met = {}
        apart += met.values()
        total += len(theirs) if len(members) > 1 else 0
    if 2 * len(apart) > total:
        row = apart[0]
        raise PipeplanError(
            f"workers: most groups of workers do not continue at one moment, such as iteration "
            f"{row.iteration} of pipeline rank {row.pipeline_rank} among workers "
            f"{', '.join(map(str, row.members))}, which ends at {row.end_s:.2f} s for one of them: "
            "the hosts' clocks differ or drift, or rows are missing; synchronise the clocks and "
            "measure again"
        )
    return list(found.items())


def _fitted(link: LinkCost, rows: Mapping[tuple[int, int], float]) -> LinkCost:
    """Return the latency and bandwidth that explain the seconds of rings.

    With n members and b bytes a ring takes ``2 (n - 1) (latency + b / n / bandwidth)``. Rings of
    one shape, or figures below zero, do not tell the two apart: both are scaled then.

    Args:
        link: as planned.
        rows: seconds by bytes and members.
    """
    steps = np.array([2.0 * (count - 1) for _, count in rows])
    moved = np.array([2.0 * (count - 1) / count * bytes_ for bytes_, count in rows])
    seconds = np.array(list(rows.values()))
    columns = np.stack([steps, moved * 1e-9], axis=1) / seconds[:, None]
    (latency_s, s_per_gb), _, rank, _ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)
    if rank < 2 or latency_s < 0 or s_per_gb <= 0:
        planned_s = steps * link.latency_s + moved * 1e-9 / link.bandwidth_gb_per_s
        factor = float(np.median(seconds / np.maximum(planned_s, 1e-12)))
        return LinkCost(link.latency_s * factor, link.bandwidth_gb_per_s / factor)
    return LinkCost(float(latency_s), float(1 / s_per_gb))
