"""The choice of a synchronisation strategy for a cluster: candidates are simulated and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.sync.simulation.comparison import (
    OVERLAPPED,
    Progress,
    SyncComparison,
    SyncResult,
    compare_syncs,
)
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.slowness import Slowdowns, Steady, Trace
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync, sync_name

EXACT: tuple[Sync, ...] = (OVERLAPPED, parse_sync("fused"), parse_sync("decoupled"))
"""Strategies that compute the same parameters as one worker with all samples."""
LOOSE: tuple[Sync, ...] = (
    parse_sync("cross_iteration"),
    parse_sync("partial_all_reduce:schedule=static"),
    parse_sync("partial_all_reduce"),
    parse_sync("partial_all_reduce:group_size=2,overlap=true"),
    parse_sync("ad_psgd"),
    parse_sync("semi_decentralized:overlap=true"),
)
"""Approximate candidates. Asynchronous servers are none: with momentum they learn less from each
gradient in real trainings than in the small problem that is simulated."""
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Learning rates of which each candidate has its best."""
STEADY_SPREAD = 0.1
"""Workers whose times differ by less count as steady."""
EQUAL = 0.01
"""A smaller relative difference of throughput is no reason to prefer another strategy."""
HORIZON = 200
"""Simulated iterations of each worker."""
SEEDS = 8
"""Seeds that times are the mean of. Of one, they differ by 3 to 15 % (standard deviation)."""
LEAST_GAIN = 0.05
"""Fraction by which an approximate strategy has to be sooner: about what the seeds leave open."""


@dataclass(frozen=True)
class Spread:
    """Differences between iterations.

    Attributes:
        slowest: the worker with the largest median iteration time.
        slowest_factor: its median over that of the median worker.
        usual_factor: the 95th percentile of iteration times over their median.
    """

    slowest: int
    slowest_factor: float
    usual_factor: float


@dataclass(frozen=True)
class StrategyChoice:
    """The chosen strategy and the reason.

    Attributes:
        sync: strategy and options.
        reason: the reason, in figures.
        spread: differences between iterations.
        comparison: all candidates' figures.
    """

    sync: Sync
    reason: str
    spread: Spread
    comparison: SyncComparison

    @property
    def alternatives(self) -> tuple[SyncResult, ...]:
        """The other candidates."""
        return tuple(row for row in self.comparison.results if row.sync != self.sync)


def choose(
    what: Plan | World | Scenario,
    trace: Trace | None = None,
    *,
    seeds: int = SEEDS,
    jobs: int = 1,
    least_gain: float = LEAST_GAIN,
    rates: Sequence[float] = RATES,
    progress: Progress | None = None,
) -> StrategyChoice:
    """Choose the strategy for pipelines as they are.

    The choice is an exact strategy, the one with most iterations per second (all_reduce if that is
    within 1 %), unless an approximate one reaches the target losses sooner by ``least_gain``.
    Approximate candidates are the cross-iteration overlap and averaging: in the groups of a fixed
    schedule, in drawn ones, in pairs, and among those that are ready. Synchronous servers do what
    all-reduce does. Each candidate has the best of the same learning rates. The simulated training
    is a small problem; an approximate strategy may cost a large one more or less, which is why it
    has to gain that much.

    Args:
        what: the pipelines, or a whole scenario.
        trace: how iterations vary, if ``what`` does not contain it.
        seeds: number of seeds to average over.
        jobs: number of processes for the simulation.
        least_gain: fraction by which an approximate strategy must reach the targets sooner.
        rates: learning rates to tune each candidate with; none: the scenario's alone.
        progress: called after every run.

    Raises:
        PipeplanError: if the plan's replicas form no pipelines, there is only one, or a value is
            out of range.
    """
    scenario = _scenario(what, trace)
    if scenario.world.workers < 2:
        raise PipeplanError("workers: one pipeline has nobody to synchronise with; give 2 or more")
    if not 0 <= least_gain <= 100:
        raise PipeplanError(
            f"least_gain: {least_gain:g} is not a fraction from 0 to 100, such as 0.05"
        )
    spread = spread_of(scenario)
    candidates = (*EXACT, *LOOSE)
    compared = compare_syncs(
        scenario, candidates, seeds=seeds, jobs=jobs, rates=rates, progress=progress
    )
    if compared.interrupted:
        raise KeyboardInterrupt
    rows = {sync_name(row.sync): row for row in compared.results}
    exact = _fastest([rows[sync_name(sync)] for sync in EXACT])
    loose = max((rows[sync_name(sync)] for sync in LOOSE), key=lambda row: row.target_speedup)
    gain = loose.target_speedup / exact.target_speedup
    best = loose if gain >= 1 + least_gain else exact
    reason = _reason(scenario, spread, rows[sync_name(OVERLAPPED)], exact, loose, best, least_gain)
    return StrategyChoice(best.sync, f"{reason}. {_compared(candidates, rates)}", spread, compared)


def _scenario(what: Plan | World | Scenario, trace: Trace | None) -> Scenario:
    if isinstance(what, Scenario):
        return what
    world = what if isinstance(what, World) else from_plan(what)
    return Scenario(world, HORIZON, trace or Steady())


def _fastest(rows: Sequence[SyncResult]) -> SyncResult:
    """Return the first of those with the largest throughput, or one within :data:`EQUAL` of it."""
    most = max(row.iterations_per_s for row in rows)
    return next(row for row in rows if row.iterations_per_s >= (1 - EQUAL) * most)


def spread_of(scenario: Scenario) -> Spread:
    """Return the differences between the scenario's iterations, for any strategy."""
    slowdowns = Slowdowns(scenario.world, scenario.trace, scenario.learning.seed)
    rows = np.stack([slowdowns.of_all(i) for i in range(1, HORIZON + 1)])
    usual = np.median(rows, axis=0)
    return Spread(
        slowest=int(usual.argmax()),
        slowest_factor=float(usual.max() / np.median(usual)),
        usual_factor=float(np.quantile(rows, 0.95) / np.median(rows)),
    )


def _reason(
    scenario: Scenario,
    spread: Spread,
    all_reduce: SyncResult,
    exact: SyncResult,
    loose: SyncResult,
    best: SyncResult,
    least_gain: float,
) -> str:
    gain = loose.target_speedup / exact.target_speedup
    share = all_reduce.iterations_per_s / _alone_per_s(scenario)
    found = (
        f"{_diagnosis(spread)}: all_reduce would run at {share:.2f} of what the pipelines compute "
        "by themselves"
    )
    if best is loose:
        rate = loose.learning_rate / exact.learning_rate
        return (
            f"{found}; {sync_name(loose.sync)} reaches the same losses {gain:.2f} times as soon as "
            f"{exact.sync.strategy}, the fastest exact strategy, at {rate:g} times its learning "
            "rate: tune yours"
        )
    return (
        f"{found}; {exact.sync.strategy} is the fastest exact strategy "
        f"({exact.overlapped_ratio:.2f} of all_reduce's throughput), and {sync_name(loose.sync)}, "
        f"the best loose one, reaches the same losses {gain:.2f} times as soon, not "
        f"{1 + least_gain:.2f} times"
    )


def _compared(candidates: Sequence[Sync], rates: Sequence[float]) -> str:
    """Describe the candidates, and how they were tuned."""
    *names, last = map(sync_name, candidates)
    tuned = f", each at the best of {len(rates)} learning rates" if rates else ""
    return f"Candidates were {', '.join(names)} and {last}{tuned}"


def _diagnosis(spread: Spread) -> str:
    if spread.slowest_factor >= 1 + STEADY_SPREAD:
        return f"worker {spread.slowest} is {spread.slowest_factor:.2f}x slower than the median"
    if spread.usual_factor >= 1 + STEADY_SPREAD:
        return f"one iteration in 20 takes {spread.usual_factor:.2f}x as long as usual, or more"
    return f"workers are steady, within {100 * (spread.slowest_factor - 1):.1f} % of the median"


def _alone_per_s(scenario: Scenario) -> float:
    """Return the iterations per second of all workers if nobody ever waited."""
    slowdowns = Slowdowns(scenario.world, scenario.trace, scenario.learning.seed)
    rows = np.stack([slowdowns.of_all(i) for i in range(1, HORIZON + 1)])
    return float((1 / rows.mean(axis=0)).sum() / scenario.world.iteration_s)
