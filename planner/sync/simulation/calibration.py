"""Calibration of a simulated world: compute times, links and overheads from a measured trace.

For each group, the trace has the last member's arrival and the times at which members continued.
Between them are the scheduler's round trip, the collective's overhead, its latency and its bytes,
and how late members notice that it is over. Groups of one have only the round trip; groups of
several sizes separate the rest, as far as they can, by non-negative linear least squares with the
least change of what the cluster file says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.measured.sync_trace import SyncStep, SyncTrace
from planner.sync.simulation.meetings import WARM_UP, Shape, durations, lateness_s, meetings_of
from planner.sync.simulation.world import LinkCost, World
from planner.sync.strategies import (
    AdPsgdOptions,
    AllReduceOptions,
    Options,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
    options_of,
)

FEWEST = 5
"""Least number of collectives of a shape that count, if some shape has this many."""
USUAL_ERROR, USUAL_CHANGE = 0.01, float(np.log(3))
"""The usual error of a shape's seconds, as a share of them, and change of a link's figure, as its
logarithm: what fits weigh errors and changes by."""
BYTES, LATENCY, OVERHEAD = range(3)
"""Places of the figures of a link: seconds a byte, of a step, and of a collective."""
SMALL = np.array([1e-15, 1e-6, 1e-4])
"""Seconds a byte, of latency and of overhead below which a figure counts as so much."""


def calibrated(world: World, measured: SyncTrace | Mapping[str, Any]) -> World:
    """Return the world with measured figures instead of predicted ones.

    Compute times: each worker's median, as a factor on the times of the pipeline ranks, which keep
    their proportions, and the usual deviation from it. Links: those of ring all-reduces in the
    trace; links that no group crossed stay in proportion to the others.

    Args:
        world: predicted; its pipeline ranks are scaled by a factor.
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
    scaled = _with_compute_times(world, trace, steps_inside=has_scheduler)
    meetings = meetings_of(trace)
    scaled = replace(scaled, lateness_s=lateness_s(scaled, meetings))
    found = durations(scaled, meetings)
    if not has_scheduler:
        # Its latency is measured by itself.
        return _with_links(_with_latency(scaled, trace), found, 0.0, median, (BYTES, OVERHEAD))
    if isinstance(options, SemiDecentralizedOptions):
        # A group may stay open after its last member has come: the quickest ones did not.
        tenth = partial(np.quantile, q=0.1)
        return _with_links(scaled, found, scaled.scheduler_round_trip_s, tenth)
    alone = [seconds for shape, rows in found.items() if shape[1] == 1 for seconds in rows]
    if alone:
        scaled = replace(scaled, scheduler_round_trip_s=median(alone))
    return _with_links(scaled, found, scaled.scheduler_round_trip_s, median)


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


def _with_compute_times(world: World, trace: SyncTrace, *, steps_inside: bool) -> World:
    """Scale the pipeline ranks to the median worker, and set a factor for each worker."""
    factors = [_factor(world, rows, steps_inside) for rows in trace.workers]
    known = [factor for factor in factors if factor is not None]
    usual = median(known)
    jitters_s = [_jitter_s(times_s) for times_s in map(_first_ranks_s, trace.workers) if times_s]
    ranks = tuple(
        replace(rank.at_speed(usual), parameter_bytes=bytes_)
        for rank, bytes_ in zip(world.ranks, trace.parameter_bytes, strict=True)
    )
    return replace(
        world,
        workers=len(trace.workers),
        ranks=ranks,
        pipelines_per_node=trace.pipelines_per_node,
        slowdown=tuple((factor or usual) / usual for factor in factors),
        jitter_s=median(jitters_s) if jitters_s else 0.0,
    )


def _counted(rows: Sequence[SyncStep]) -> list[SyncStep]:
    """Return a worker's iterations after the first, which connects and allocates."""
    return [row for row in rows if row.iteration > WARM_UP and row.compute_s > 0]


def _first_ranks_s(rows: Sequence[SyncStep]) -> list[float]:
    """Return the times of a worker's first rank."""
    return [row.compute_s for row in _counted(rows) if not row.pipeline_rank]


def _jitter_s(times_s: Sequence[float]) -> float:
    """Return the standard deviation of a worker's times, as most of them show it.

    Occasional pauses hardly change the median distance from the median, which is 0.6745 standard
    deviations of a normal distribution.
    """
    usual_s = median(times_s)
    return median(abs(time_s - usual_s) for time_s in times_s) / 0.6745


def _factor(world: World, rows: Sequence[SyncStep], steps_inside: bool) -> float | None:
    """Return the median factor of a worker's measured times over the predicted ones."""
    found = []
    for row in _counted(rows):
        rank = world.ranks[row.pipeline_rank]
        expected_s = rank.last_backward_s + (rank.optimizer_s if steps_inside else 0.0)
        found.append(row.compute_s / expected_s)
    return median(found) if found else None


def _with_latency(world: World, trace: SyncTrace) -> World:
    """Take the latency from what passes between iterations, in which ranks tell their losses."""
    rows = [[row for row in rows if not row.pipeline_rank] for rows in trace.workers]
    together = list(zip(*rows, strict=False))[WARM_UP:]
    gaps_s = [
        min(row.start_s for row in after) - max(row.end_s for row in before)
        for before, after in pairwise(together)
    ]
    steps = len(trace.workers) - 1
    if not gaps_s or not steps:
        return world
    latency_s = max(0.0, median(gaps_s)) / steps
    crosses = world.crosses(tuple(range(world.workers)))
    within, between = (
        replace(link, latency_s=latency_s) if its == crosses else link
        for its, link in ((False, world.within), (True, world.between))
    )
    return world.at_links(within, between)


def _with_links(
    world: World,
    found: Mapping[Shape, Sequence[float]],
    round_trip_s: float,
    usual: Callable[[Sequence[float]], float],
    open_figures: Sequence[int] = (BYTES, LATENCY, OVERHEAD),
) -> World:
    frequent = {shape: rows for shape, rows in found.items() if len(rows) >= FEWEST}
    found = frequent or found
    fits = {}
    for crosses in (False, True):
        rows = {
            shape: max(usual(seconds) - round_trip_s, 1e-9)
            for shape, seconds in found.items()
            if shape[1] > 1 and shape[2] == crosses
        }
        if rows:
            link = world.between if crosses else world.within
            given = (1e-9 / link.bandwidth_gb_per_s, link.latency_s, world.collective_overhead_s)
            fits[crosses] = _fitted(rows, given, round_trip_s, open_figures)
    if not fits:
        return world
    links = {False: world.within, True: world.between}
    for crosses, (s_per_byte, latency_s, _) in fits.items():
        links[crosses] = LinkCost(latency_s, 1e-9 / max(s_per_byte, 1e-15))
    overhead_s = median(fit[OVERHEAD] for fit in fits.values())
    return replace(world.at_links(links[False], links[True]), collective_overhead_s=overhead_s)


def _fitted(
    rows: Mapping[Shape, float],
    given: Sequence[float],
    round_trip_s: float,
    open_figures: Sequence[int],
) -> tuple[float, float, float]:
    """Return seconds a byte, of latency and of overhead.

    Fits the ring's seconds as a linear function of bytes moved, steps and overhead.

    A trace has few shapes, which several combinations of the three figures explain: of a group that
    takes longer than expected, the link may be narrower, or each message may take longer before its
    first byte. Every subset of them that is no larger than the number of shapes is fitted, while
    the others stay as they were. The subset counts that explains the shapes with the least change:
    least squares of errors and of changes, in units of :data:`USUAL_ERROR` and
    :data:`USUAL_CHANGE`.

    Args:
        rows: seconds by shape, without the scheduler's round trip.
        given: seconds a byte, of latency and of overhead before.
        round_trip_s: what was taken off.
        open_figures: places of those that may change.
    """
    steps = np.array([2.0 * (count - 1) for _, count, _ in rows])
    moved = np.array([2.0 * (count - 1) / count * bytes_ for bytes_, count, _ in rows])
    columns = np.stack([moved, steps, np.ones(len(rows))], axis=1)
    before, target = np.array(given), np.array(list(rows.values()))
    found = []
    for size in range(1, min(len(rows), len(open_figures)) + 1):
        for free in map(list, combinations(open_figures, size)):
            values = before.copy()
            values[free] = 0.0
            rest = target - columns @ values
            values[free] = _not_negative(columns[:, free], rest, target)
            errors = (columns @ values - target) / (target + round_trip_s)
            found.append((_cost(errors, values, before), tuple(values)))
    s_per_byte, latency_s, overhead_s = map(float, min(found)[1])
    return s_per_byte, latency_s, overhead_s


def _cost(errors: FloatArray, values: FloatArray, given: FloatArray) -> float:
    changes = np.log(np.maximum(values, SMALL) / np.maximum(given, SMALL)) / USUAL_CHANGE
    return float(np.sum((errors / USUAL_ERROR) ** 2) + np.sum(changes**2))


def _not_negative(columns: FloatArray, rest: FloatArray, target: FloatArray) -> FloatArray:
    """Return the least squares of the relative error, without terms that would be negative.

    Args:
        columns: of the terms, by rows.
        rest: what they are to explain of each row.
        target: which errors are relative to.
    """
    weights = 1 / np.maximum(target, 1e-9)
    scale = np.abs(columns).max(axis=0) + 1e-300
    kept = list(range(columns.shape[1]))
    values = np.zeros(columns.shape[1])
    while kept:
        rows = (columns / scale)[:, kept] * weights[:, None]
        solved = np.linalg.lstsq(rows, rest * weights, rcond=None)[0]
        if (solved >= 0).all():
            values[kept] = solved / scale[kept]
            return values
        kept = [name for name, value in zip(kept, solved, strict=True) if value >= 0]
    return values
