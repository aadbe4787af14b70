"""The choice of a synchronisation strategy for a cluster: candidates are simulated and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.sync.simulation.comparison import (
    OVERLAPPED,
    Progress,
    SyncComparison,
    SyncResult,
    compare_syncs,
)
from planner.sync.simulation.planned import require_several, scenario_of
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.slowness import Slowdowns
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync, sync_name

EXACT: tuple[Sync, ...] = (OVERLAPPED, parse_sync("fused"), parse_sync("decoupled"))
"""Strategies that compute the same parameters as one worker with all samples."""
APPROXIMATE: tuple[Sync, ...] = (
    parse_sync("cross_iteration"),
    parse_sync("partial_all_reduce:schedule=static"),
    parse_sync("partial_all_reduce"),
    parse_sync("partial_all_reduce:group_size=2,overlap=true"),
    parse_sync("ad_psgd"),
    parse_sync("semi_decentralized:overlap=true"),
)
"""Candidates that do not. Synchronous servers are none: they compute what all-reduce does. Nor are
asynchronous ones: with momentum they learn less from each gradient in real trainings than in the
small problem that is simulated."""
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Learning rates of which each candidate has its best."""
STEADY_SPREAD = 0.1
"""Workers whose times differ by less count as steady."""
EQUAL = 0.01
"""A smaller relative difference of throughput is no reason to prefer another strategy."""
HORIZON = Scenario.iterations
"""Simulated iterations of each worker, where no scenario says how many."""
SEEDS = 8
"""Seeds that times are the mean of. Of one, they differ by 3 to 15 % (standard deviation)."""
LEAST_GAIN = 0.05
"""Fraction by which an approximate strategy has to be sooner: times with :data:`SEEDS` seeds differ
by up to about as much by chance."""


@dataclass(frozen=True)
class Spread:
    """Differences between workers, and between iterations.

    Attributes:
        slowest: the worker with the largest median iteration time.
        slowest_factor: its median over that of the median worker, of two of the quicker one.
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


class InterruptedChoice(KeyboardInterrupt):
    """Ctrl-C came before all candidates were simulated.

    Attributes:
        comparison: those that were.
    """

    def __init__(self, comparison: SyncComparison) -> None:
        super().__init__(
            f"after {len(comparison.results)} of {len(EXACT) + len(APPROXIMATE)} candidates; none "
            "is chosen"
        )
        self.comparison = comparison


def choose(
    what: Plan | World | Scenario,
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
    schedule, in drawn ones, in pairs, and among those that are ready. Each candidate has the best
    of the same learning rates. The simulated training
    is a small problem; an approximate strategy may cost a large one more or less, which is why it
    has to gain that much.

    Args:
        what: the pipelines, or a whole scenario.
        seeds: number of seeds to average over.
        jobs: number of processes for the simulation.
        least_gain: fraction by which an approximate strategy must reach the targets sooner.
        rates: learning rates to tune each candidate with; none: the scenario's alone.
        progress: called after every run.

    Raises:
        PipeplanError: if the plan's replicas form no pipelines, there is only one, or a value is
            out of range.
        InterruptedChoice: on Ctrl-C, with the candidates that are done.
    """
    scenario = scenario_of(what)
    require_several(scenario.world)
    if not 0 <= least_gain <= 100:
        raise PipeplanError(
            f"least_gain: {least_gain:g} is not a fraction from 0 to 100, such as 0.05"
        )
    spread = spread_of(scenario)
    candidates = (*EXACT, *APPROXIMATE)
    compared = compare_syncs(
        scenario, candidates, seeds=seeds, jobs=jobs, rates=rates, progress=progress
    )
    if compared.interrupted:
        raise InterruptedChoice(compared)
    rows = {sync_name(row.sync): row for row in compared.results}
    exact = _fastest([rows[sync_name(sync)] for sync in EXACT])
    approximate = max(
        (rows[sync_name(sync)] for sync in APPROXIMATE), key=lambda row: row.target_speedup
    )
    gain = approximate.target_speedup / exact.target_speedup
    best = approximate if gain >= 1 + least_gain else exact
    reason = _reason(
        scenario, spread, rows[sync_name(OVERLAPPED)], exact, approximate, best, least_gain
    )
    return StrategyChoice(best.sync, f"{reason}. {_compared(candidates, rates)}", spread, compared)


def _fastest(rows: Sequence[SyncResult]) -> SyncResult:
    """Return the first of those with the largest throughput, or one within :data:`EQUAL` of it."""
    most = max(row.iterations_per_s for row in rows)
    return next(row for row in rows if row.iterations_per_s >= (1 - EQUAL) * most)


def spread_of(scenario: Scenario) -> Spread:
    """Return the differences between the scenario's iterations, for any strategy."""
    rows = _slowdowns(scenario)
    usual = np.median(rows, axis=0)
    middle = np.quantile(usual, 0.5, method="lower")
    return Spread(
        slowest=int(usual.argmax()),
        slowest_factor=float(usual.max() / middle),
        usual_factor=float(np.quantile(rows, 0.95) / np.median(rows)),
    )


def _reason(
    scenario: Scenario,
    spread: Spread,
    all_reduce: SyncResult,
    exact: SyncResult,
    approximate: SyncResult,
    best: SyncResult,
    least_gain: float,
) -> str:
    gain = approximate.target_speedup / exact.target_speedup
    share = all_reduce.iterations_per_s / _alone_per_s(scenario)
    found = (
        f"{_diagnosis(spread)}, and all_reduce would run at {share:.2f} of what they compute "
        "without waiting"
    )
    if scenario.faults:
        found += (
            " (as if a job without the pipelines that leave went on: it ends, and resumes from a "
            "checkpoint)"
        )
    if best is approximate:
        rate = approximate.learning_rate / exact.learning_rate
        rates = "the same learning rate" if rate == 1 else f"{rate:g} times its learning rate"
        return (
            f"{found}; {sync_name(approximate.sync)} reaches the same losses {gain:.2f} times as "
            f"soon as {exact.sync.strategy}, the fastest exact strategy, at {rates}"
            f"{'' if rate == 1 else ': tune yours'}"
        )
    ratio = exact.overlapped_ratio
    faster = (
        "no exact strategy is faster than all_reduce"
        if exact is all_reduce
        else f"{exact.sync.strategy} is the fastest exact strategy, with {ratio:.2f} times its "
        "throughput"
    )
    return (
        f"{found}; {faster}, and {sync_name(approximate.sync)}, the best approximate one, reaches "
        f"the same losses {gain:.2f} times as soon, where {1 + least_gain:.2f} times is asked of it"
    )


def _compared(candidates: Sequence[Sync], rates: Sequence[float]) -> str:
    """Describe the candidates, and how they were tuned."""
    *names, last = map(sync_name, candidates)
    tuned = f", each at the best of {len(rates)} learning rates" if rates else ""
    return f"Candidates were {', '.join(names)} and {last}{tuned}"


def _diagnosis(spread: Spread) -> str:
    if spread.slowest_factor >= 1 + STEADY_SPREAD:
        factor = spread.slowest_factor
        return f"pipeline {spread.slowest} takes {factor:.2f} times as long as the median one"
    if spread.usual_factor >= 1 + STEADY_SPREAD:
        return (
            f"one iteration in 20 takes {spread.usual_factor:.2f} times as long as usual, or more"
        )
    return f"pipelines are steady, within {100 * (spread.slowest_factor - 1):.1f} % of the median"


def _alone_per_s(scenario: Scenario) -> float:
    """Return the iterations per second of all workers if nobody ever waited."""
    usual = _slowdowns(scenario).mean(axis=0)
    return float((1 / usual).sum() / scenario.world.iteration_s)


def _slowdowns(scenario: Scenario) -> FloatArray:
    """Return the factors of iterations, by iteration and worker."""
    slowdowns = Slowdowns(scenario.world, scenario.trace, scenario.learning.seed)
    return np.stack([slowdowns.of_all(i) for i in range(1, HORIZON + 1)])
