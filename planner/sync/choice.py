"""Which strategy of synchronisation suits a cluster, and why: the candidates are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.artifacts.plan import Plan, Sync
from planner.errors import PipeplanError
from planner.sync.simulation.comparison import (
    OVERLAPPED,
    Progress,
    SyncComparison,
    SyncResult,
    compare_syncs,
)
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.slowness import Steady, Stretches, Trace
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync, sync_name

EXACT: tuple[Sync, ...] = (OVERLAPPED, parse_sync("fused"), parse_sync("decoupled"))
"""What computes the same parameters as one worker with all samples would."""
DIVISION = parse_sync("partial_all_reduce")
READINESS = parse_sync("semi_decentralized:overlap=true")
APPROXIMATE = parse_sync("cross_iteration")
STEADY_SPREAD = 0.1
"""Below it groups can be fixed before it is known who is ready, and mix better so."""
EQUAL = 0.01
"""A share of throughput that is no reason to leave the plainest strategy."""
HORIZON = 200
"""Iterations simulated of each worker."""


@dataclass(frozen=True)
class Spread:
    """How unequal iterations are.

    Attributes:
        slowest: the worker whose median iteration takes longest.
        slowest_factor: by which it takes longer than the median worker's.
        usual_factor: by which the slowest twentieth of all iterations takes longer, at least, than
            the median iteration.
    """

    slowest: int
    slowest_factor: float
    usual_factor: float

    @property
    def is_steady(self) -> bool:
        """Whether neither a worker nor one iteration in twenty is noticeably slow."""
        return max(self.slowest_factor, self.usual_factor) < 1 + STEADY_SPREAD


@dataclass(frozen=True)
class Choice:
    """What to use.

    Attributes:
        sync: strategy and options.
        reason: why, in figures.
        spread: of the iterations.
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
    seeds: int = 1,
    jobs: int = 1,
    least_gain: float = 0.1,
    progress: Progress | None = None,
) -> Choice:
    """The strategy for pipelines as they are.

    An exact strategy, the one of most iterations a second (all_reduce if that is within 1 %),
    unless a loose one reaches the target loss so much sooner. Loose ones are the cross-iteration
    overlap, and averaging in groups: by division where workers are steady, by readiness where some
    are slow now and then or always. Servers and pairs are no candidates: their training differs
    most from that of one process. The simulation's training is of a small problem; a loose
    strategy may cost a large one more or less, which is why it has to gain that much.

    Args:
        what: the pipelines, or all of what happens to them.
        trace: how iterations vary, where ``what`` does not say it.
        seeds: how many to average over.
        jobs: processes to simulate in.
        least_gain: share of time by which a loose strategy must be faster to the target.
        progress: told of every run.

    Raises:
        PipeplanError: if the plan's replicas form no pipelines, there is one only, or a value is
            out of range.
    """
    scenario = _scenario(what, trace)
    if scenario.world.workers < 2:
        raise PipeplanError("workers: one pipeline has nobody to synchronise with; give 2 or more")
    if not 0 <= least_gain <= 100:
        raise PipeplanError(f"least_gain: {least_gain:g} is not a share from 0 to 100, such as 0.1")
    spread = spread_of(scenario)
    groups = DIVISION if spread.is_steady else READINESS
    candidates = (*EXACT, APPROXIMATE, groups)
    compared = compare_syncs(scenario, candidates, seeds=seeds, jobs=jobs, progress=progress)
    if compared.interrupted:
        raise KeyboardInterrupt
    rows = {row.sync.strategy: row for row in compared.results}
    exact = _fastest([rows[sync.strategy] for sync in EXACT])
    loose = min((rows[sync.strategy] for sync in (APPROXIMATE, groups)), key=_target_s)
    gain = _target_s(exact) / _target_s(loose)
    best = loose if gain >= 1 + least_gain else exact
    reason = _reason(scenario, spread, rows[OVERLAPPED.strategy], exact, loose, best, least_gain)
    return Choice(best.sync, f"{reason}. {_compared(candidates)}", spread, compared)


def _scenario(what: Plan | World | Scenario, trace: Trace | None) -> Scenario:
    if isinstance(what, Scenario):
        return what
    world = what if isinstance(what, World) else from_plan(what)
    return Scenario(world, HORIZON, trace or Steady())


def _fastest(rows: Sequence[SyncResult]) -> SyncResult:
    """The first of those whose throughput is the largest, or as good as that."""
    most = max(row.iterations_per_s for row in rows)
    return next(row for row in rows if row.iterations_per_s >= (1 - EQUAL) * most)


def _target_s(row: SyncResult) -> float:
    """Seconds to the target; whoever never reached it is last."""
    return 1e300 if row.target_s is None else max(row.target_s, 1e-300)


def spread_of(scenario: Scenario) -> Spread:
    """How unequal the scenario's iterations are, whatever the strategy."""
    stretches = Stretches(scenario.world, scenario.trace, scenario.learning.seed)
    rows = np.stack([stretches.of_all(i) for i in range(1, HORIZON + 1)])
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
    gain = _target_s(exact) / _target_s(loose)
    share = all_reduce.iterations_per_s / _alone_per_s(scenario)
    found = (
        f"{_diagnosis(spread)}: all_reduce would run at {share:.2f} of what the pipelines compute "
        "by themselves"
    )
    if best is loose:
        return (
            f"{found}; {loose.sync.strategy} reaches the same loss {gain:.2f} times as soon as "
            f"{exact.sync.strategy}, the fastest exact strategy"
        )
    return (
        f"{found}; {exact.sync.strategy} is the fastest exact strategy "
        f"({exact.overlapped_ratio:.2f} of all_reduce's throughput), and {loose.sync.strategy}, "
        f"the best loose one, reaches the same loss {gain:.2f} times as soon, not "
        f"{1 + least_gain:.2f} times"
    )


def _compared(candidates: Sequence[Sync]) -> str:
    """Which strategies the choice was between, and which it never is."""
    *names, last = map(sync_name, candidates)
    return (
        f"Candidates were {', '.join(names)} and {last}; servers and pairs of pipelines are "
        "compared by --sync all and never chosen, since their training differs most from that of "
        "one process"
    )


def _diagnosis(spread: Spread) -> str:
    if spread.slowest_factor >= 1 + STEADY_SPREAD:
        return f"worker {spread.slowest} is {spread.slowest_factor:.2f}x slower than the median"
    if spread.usual_factor >= 1 + STEADY_SPREAD:
        return f"one iteration in 20 takes {spread.usual_factor:.2f}x as long as usual, or more"
    return f"workers are steady, within {100 * (spread.slowest_factor - 1):.1f} % of the median"


def _alone_per_s(scenario: Scenario) -> float:
    """Iterations a second of all workers if nobody ever waited."""
    stretches = Stretches(scenario.world, scenario.trace, scenario.learning.seed)
    rows = np.stack([stretches.of_all(i) for i in range(1, HORIZON + 1)])
    return float((1 / rows.mean(axis=0)).sum() / scenario.world.iteration_s)
