"""Comparison of several strategies in one scenario against all-reduce, in parallel processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from statistics import fmean, geometric_mean

from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.sync.simulation.planned import scenario_of
from planner.sync.simulation.processes import RunAll, runner
from planner.sync.simulation.run import Scenario, SimulatedRun
from planner.sync.simulation.world import World
from planner.sync.strategies import parse_sync, require_fit

PLAIN = parse_sync("all_reduce:overlap=false")
OVERLAPPED = parse_sync("all_reduce")
ALL_STRATEGIES: tuple[Sync, ...] = (
    PLAIN,
    OVERLAPPED,
    *map(
        parse_sync,
        (
            "fused",
            "decoupled",
            "cross_iteration",
            "parameter_server",
            "parameter_server:mode=async",
            "eager_parameter_server",
            "wave_synchronous",
            "ad_psgd",
            "ad_psgd:pairs=matching",
            "partial_all_reduce:schedule=static",
            "partial_all_reduce",
            "partial_all_reduce:group_size=2,overlap=true",
            "semi_decentralized",
            "semi_decentralized:overlap=true",
        ),
    ),
)
"""Every strategy, in each of its forms."""
EXACT_SERVER = parse_sync("parameter_server")
TARGET_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Fractions of all-reduce's iterations whose losses are the targets. The time to one loss alone
differs by two or three times as much between seeds: a part of the curve is flat."""
PENALTY = 2.0
"""Counts a loss that was not reached as a multiple of the time in which it was not, as comparisons
of solvers with a time limit do (penalized average runtime, PAR2)."""
AT_ONCE_S = 1e-9
MOST_SEEDS = 1000
MOST_JOBS = 256
Progress = Callable[[Sync, int], None]
"""Called when a strategy and seed is done."""


@dataclass(frozen=True)
class SyncResult:
    """Results of a strategy, means over the seeds.

    Attributes:
        sync: the strategy.
        iterations_per_s: of all workers together.
        throughput_ratio: relative to all-reduce that begins after the backward.
        overlapped_ratio: relative to all-reduce overlapped with the backward.
        target_s: simulated seconds until the mean model reached a target loss, the geometric mean
            over all targets and seeds. A target that it did not reach counts as :data:`PENALTY`
            times the run, or as often all-reduce's time to it, if that is longer.
        missed_targets: how many it did not reach, of all seeds.
        target_speedup: overlapped all-reduce's time over this one; above 1 is faster.
        final_loss: loss of the mean model after the same number of samples for all strategies.
        consensus_distance: root mean square distance of the workers' weights from their mean, as a
            fraction of the mean's norm, over the second half of the run.
        spectral_gap: 1 less the second eigenvalue of a round's mean mixing matrix; None if workers
            do not average.
        sent_bytes: bytes sent by all workers and servers.
        idle_share: idle fraction of the workers' time.
        staleness: see :class:`planner.sync.simulation.run.SimulatedRun`; the largest over the
            seeds.
        steps: iterations of each worker, with the first seed.
        learning_rate: of the runs.
    """

    sync: Sync
    iterations_per_s: float
    throughput_ratio: float
    overlapped_ratio: float
    target_s: float
    missed_targets: int
    target_speedup: float
    final_loss: float
    consensus_distance: float
    spectral_gap: float | None
    sent_bytes: float
    idle_share: float
    staleness: int
    steps: tuple[int, ...]
    learning_rate: float


@dataclass(frozen=True)
class SyncComparison:
    """The result of :func:`compare_syncs`.

    Attributes:
        scenario: the scenario, with the first seed.
        seeds: number of seeds.
        target_losses: losses of the mean model that all-reduce has after :data:`TARGET_SHARES` of
            its iterations; means over the seeds, each of which has its own.
        results: in the order of the arguments.
        interrupted: whether strategies are missing because the user interrupted the run.
    """

    scenario: Scenario
    seeds: int
    target_losses: tuple[float, ...]
    results: tuple[SyncResult, ...]
    interrupted: bool = False


def compare_syncs(
    what: Plan | World | Scenario,
    syncs: Sequence[Sync] = ALL_STRATEGIES,
    *,
    seeds: int = 1,
    jobs: int = 1,
    rates: Sequence[float] = (),
    progress: Progress | None = None,
) -> SyncComparison:
    """Simulate strategies, and all-reduce in both forms for comparison.

    The results depend only on the arguments, not on the number of jobs. On Ctrl-C the finished
    results are returned, if all-reduce is among them.

    Args:
        what: the pipelines, steady for 200 iterations, or a whole scenario.
        syncs: the strategies.
        seeds: number of seeds to average over: the scenario's and those that follow it.
        jobs: number of processes.
        rates: learning rates of which each strategy has its best, found with half as many other
            seeds: all-reduce that of the least mean loss after :data:`TARGET_SHARES`,
            the others that of the least ``target_s``. Those that compute what all-reduce does have
            all-reduce's. Empty: the scenario's for all.
        progress: called after every run.

    Raises:
        PipeplanError: if an argument is out of range, or a strategy or an option is wrong.
    """
    scenario = scenario_of(what)
    _check(seeds, jobs, rates)
    for sync in syncs:
        require_fit(sync, scenario.world.workers)
    wanted = list({_name(sync): sync for sync in (PLAIN, OVERLAPPED, *syncs)}.values())
    found: dict[str, list[SimulatedRun]] = defaultdict(list)
    tuned: dict[str, Scenario] = {}
    total = scenario.iterations * scenario.world.workers
    shares = [share * total for share in TARGET_SHARES]
    interrupted = False
    try:
        with runner(min(jobs, max(len(rates), 1) * seeds * len(wanted))) as run_all:
            tuned = _tuned(scenario, wanted, rates, seeds, shares, run_all, progress)
            tasks = [
                (tuned[_name(sync)].with_seed(scenario.learning.seed + seed), sync)
                for sync in wanted
                for seed in range(seeds)
            ]
            for run in run_all(tasks):
                found[_name(run.sync)].append(run)
                if progress is not None:
                    progress(run.sync, len(found[_name(run.sync)]))
    except KeyboardInterrupt:
        interrupted = True
    whole = {name: runs for name, runs in found.items() if len(runs) == seeds}
    if _name(PLAIN) not in whole or _name(OVERLAPPED) not in whole:
        raise KeyboardInterrupt
    targets = _losses(whole[_name(OVERLAPPED)], shares)
    names = [_name(sync) for sync in syncs if _name(sync) in whole]
    results = tuple(_result(tuned[name], whole[name], whole, targets) for name in names)
    means = tuple(fmean(losses) for losses in zip(*targets, strict=True))
    return SyncComparison(scenario, seeds, means, results, interrupted)


def _losses(runs: Sequence[SimulatedRun], shares: Sequence[float]) -> list[list[float]]:
    """Return the losses after so many iterations of all workers together, by seed."""
    return [[run.loss_after(share) for share in shares] for run in runs]


def _tuned(
    scenario: Scenario,
    syncs: Sequence[Sync],
    rates: Sequence[float],
    seeds: int,
    shares: Sequence[float],
    run_all: RunAll,
    progress: Progress | None,
) -> dict[str, Scenario]:
    """Return the scenario with the best learning rate of each strategy, by its name.

    Args:
        scenario: of all strategies.
        syncs: the strategies.
        rates: to choose from; none: the scenario's is kept.
        seeds: how many are compared; half as many follow them here.
        shares: iterations of all workers after which all-reduce's losses are the targets.
        run_all: runs tasks, in order.
        progress: called after every run.
    """
    if not rates:
        return {_name(sync): scenario for sync in syncs}
    learnings = [replace(scenario.learning, learning_rate=rate) for rate in rates]
    scenarios = [replace(scenario, learning=learning) for learning in learnings]
    count = (seeds + 1) // 2

    def tried(syncs: Iterable[Sync]) -> dict[str, list[list[SimulatedRun]]]:
        """Return the runs by strategy and learning rate."""
        first = scenario.learning.seed + seeds
        tasks = [
            (at_rate.with_seed(first + n), sync)
            for sync in syncs
            for at_rate in scenarios
            for n in range(count)
        ]
        runs: dict[str, list[SimulatedRun]] = defaultdict(list)
        for run in run_all(tasks):
            runs[_name(run.sync)].append(run)
            if progress is not None:
                progress(run.sync, 0)
        return {
            name: [row[n : n + count] for n in range(0, len(row), count)]
            for name, row in runs.items()
        }

    all_reduce = tried([OVERLAPPED])[_name(OVERLAPPED)]
    means = [_mean_loss(_losses(runs, shares)) for runs in all_reduce]
    best = {_name(OVERLAPPED): means.index(min(means))}
    rivals = all_reduce[best[_name(OVERLAPPED)]]
    targets = _losses(rivals, shares)
    learners = {_name(learner_of(sync)): learner_of(sync) for sync in syncs}
    for name, rows in tried(sync for name, sync in learners.items() if name not in best).items():
        scores = [_target_s(runs, rivals, targets) for runs in rows]
        best[name] = scores.index(min(scores))
    return {_name(sync): scenarios[best[_name(learner_of(sync))]] for sync in syncs}


def learner_of(sync: Sync) -> Sync:
    """Return overlapped all-reduce for a strategy that computes the same weights, else itself."""
    is_exact = sync.strategy in ("all_reduce", "fused", "decoupled")
    return OVERLAPPED if is_exact or sync == EXACT_SERVER else sync


def _check(seeds: int, jobs: int, rates: Sequence[float]) -> None:
    problems = []
    if not 1 <= seeds <= MOST_SEEDS:
        problems.append(f"seeds: {seeds} is not a whole number from 1 to {MOST_SEEDS}")
    if not 1 <= jobs <= MOST_JOBS:
        problems.append(f"jobs: {jobs} is not a whole number from 1 to {MOST_JOBS}")
    problems += [
        f"rates: {rate:g} is not a learning rate above 0, such as 0.1"
        for rate in rates
        if not 0 < rate < inf
    ]
    if problems:
        raise PipeplanError(problems)


def _name(sync: Sync) -> str:
    return sync.model_dump_json()


def _result(
    scenario: Scenario,
    runs: Sequence[SimulatedRun],
    all_runs: Mapping[str, Sequence[SimulatedRun]],
    targets: Sequence[Sequence[float]],
) -> SyncResult:
    plain, overlapped = all_runs[_name(PLAIN)], all_runs[_name(OVERLAPPED)]

    def ratio(others: Sequence[SimulatedRun]) -> float:
        pairs = zip(runs, others, strict=True)
        return fmean(run.iterations_per_s / other.iterations_per_s for run, other in pairs)

    gaps = [run.spectral_gap for run in runs if run.spectral_gap is not None]
    target_s = _target_s(runs, overlapped, targets)
    reached_s = [
        run.time_to_s(loss) for run, row in zip(runs, targets, strict=True) for loss in row
    ]
    return SyncResult(
        sync=runs[0].sync,
        iterations_per_s=fmean(run.iterations_per_s for run in runs),
        throughput_ratio=ratio(plain),
        overlapped_ratio=ratio(overlapped),
        target_s=target_s,
        missed_targets=reached_s.count(None),
        target_speedup=_target_s(overlapped, overlapped, targets) / target_s,
        final_loss=fmean(
            run.loss_after(scenario.iterations * scenario.world.workers) for run in runs
        ),
        consensus_distance=fmean(run.consensus_distance for run in runs),
        spectral_gap=fmean(gaps) if gaps else None,
        sent_bytes=fmean(run.sent_bytes for run in runs),
        idle_share=fmean(run.idle_share for run in runs),
        staleness=max(run.staleness for run in runs),
        steps=runs[0].done,
        learning_rate=scenario.learning.learning_rate,
    )


def _target_s(
    runs: Sequence[SimulatedRun],
    all_reduce: Sequence[SimulatedRun],
    targets: Sequence[Sequence[float]],
) -> float:
    """Return the geometric mean of the times to the targets, with a penalty for those not reached.

    Args:
        runs: by seed.
        all_reduce: whose losses are the targets.
        targets: losses, by seed.
    """
    found = []
    for run, rival, losses in zip(runs, all_reduce, targets, strict=True):
        for loss in losses:
            own_s = run.time_to_s(loss)
            if own_s is None:
                rival_s = rival.time_to_s(loss)
                own_s = PENALTY * max(run.time_s, rival.time_s if rival_s is None else rival_s)
            # There at once, where all-reduce's loss is no less than the one at the start.
            found.append(max(own_s, AT_ONCE_S))
    return geometric_mean(found)


def _mean_loss(rows: Sequence[Sequence[float]]) -> float:
    """Return the mean over seeds and shares; what diverged comes last."""
    losses = [loss for row in rows for loss in row]
    return inf if any(map(isnan, losses)) else fmean(losses)
