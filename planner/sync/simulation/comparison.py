"""Comparison of several strategies in one scenario against all-reduce, in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from statistics import fmean

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.simulation.processes import RunAll, runner
from planner.sync.simulation.run import Scenario, SimulatedRun
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
        target_s: virtual time until the mean model reached the target; None: not in every seed.
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
    target_s: float | None
    target_speedup: float | None
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
        target_loss: loss of the mean model that all-reduce reaches after ``target_share`` of its
            iterations; a mean over the seeds, each of which has its own.
        results: in the order of the arguments.
        interrupted: whether strategies are missing because the user interrupted the run.
    """

    scenario: Scenario
    seeds: int
    target_loss: float
    results: tuple[SyncResult, ...]
    interrupted: bool = False


def compare_syncs(
    scenario: Scenario,
    syncs: Sequence[Sync] = ALL_STRATEGIES,
    *,
    seeds: int = 1,
    jobs: int = 1,
    target_share: float = 0.5,
    rates: Sequence[float] = (),
    progress: Progress | None = None,
) -> SyncComparison:
    """Simulate strategies, and all-reduce in both forms for comparison.

    The results depend only on the arguments, not on the number of jobs. On Ctrl-C the finished
    results are returned, if all-reduce is among them.

    Args:
        scenario: the scenario of all strategies.
        syncs: the strategies.
        seeds: number of seeds to average over: the scenario's and those that follow it.
        jobs: number of processes.
        target_share: fraction of all-reduce's iterations whose loss is the target.
        rates: learning rates of which each strategy has its best, with half as many seeds that
            count for nothing else: all-reduce that of the least loss after ``target_share``, the
            others that with which they get there soonest. Those that compute what all-reduce does
            have all-reduce's. None: the scenario's.
        progress: called after every run.

    Raises:
        PipeplanError: if an argument is out of range, or a strategy or an option is wrong.
    """
    _check(seeds, jobs, target_share)
    for sync in syncs:
        require_fit(sync, scenario.world.workers)
    wanted = list({_name(sync): sync for sync in (PLAIN, OVERLAPPED, *syncs)}.values())
    found: dict[int, list[SimulatedRun]] = {}
    tuned: dict[str, Scenario] = {}
    interrupted = False
    try:
        with runner(min(jobs, max(len(rates), 1) * seeds * len(wanted))) as run_all:
            tuning = _Tuning(scenario, rates, seeds, target_share, run_all, progress)
            tuned = tuning.tuned(wanted)
            tasks = [
                (tuned[_name(sync)].with_seed(scenario.learning.seed + seed), sync, index)
                for index, sync in enumerate(wanted)
                for seed in range(seeds)
            ]
            for index, run in run_all(tasks):
                found.setdefault(index, []).append(run)
                if progress is not None:
                    progress(run.sync, len(found[index]))
    except KeyboardInterrupt:
        interrupted = True
    whole = {_name(wanted[index]): runs for index, runs in found.items() if len(runs) == seeds}
    if _name(PLAIN) not in whole or _name(OVERLAPPED) not in whole:
        raise KeyboardInterrupt
    results = _results(tuned, syncs, whole, target_share)
    targets = _targets(scenario, whole, target_share)
    return SyncComparison(scenario, seeds, fmean(targets), results, interrupted)


@dataclass(frozen=True)
class _Tuning:
    """Each strategy's best learning rate.

    Attributes:
        scenario: of all strategies.
        rates: to choose from; none: the scenario's is kept.
        seeds: how many are compared; half as many follow them here.
        target_share: of all-reduce's iterations.
        run_all: runs tasks, in order.
        progress: called after every run.
    """

    scenario: Scenario
    rates: Sequence[float]
    seeds: int
    target_share: float
    run_all: RunAll
    progress: Progress | None

    def tuned(self, syncs: Sequence[Sync]) -> dict[str, Scenario]:
        """Return the scenario with the best learning rate of each strategy, by its name."""
        if not self.rates:
            return {_name(sync): self.scenario for sync in syncs}
        share = self.target_share * self.scenario.iterations * self.scenario.world.workers
        all_reduce = self._tried([OVERLAPPED])[_name(OVERLAPPED)]
        losses = [[run.loss_after(share) for run in runs] for runs in all_reduce]
        means = [inf if any(map(isnan, row)) else fmean(row) for row in losses]
        best = {_name(OVERLAPPED): means.index(min(means))}
        targets = losses[best[_name(OVERLAPPED)]]
        learners = {_name(learner_of(sync)): learner_of(sync) for sync in syncs}
        others = [sync for name, sync in learners.items() if name not in best]
        for name, rows in self._tried(others).items():
            scores = [self._score(runs, targets) for runs in rows]
            best[name] = scores.index(min(scores))
        return {_name(sync): self._at(best[_name(learner_of(sync))]) for sync in syncs}

    def _at(self, number: int) -> Scenario:
        learning = replace(self.scenario.learning, learning_rate=self.rates[number])
        return replace(self.scenario, learning=learning)

    def _tried(self, syncs: Sequence[Sync]) -> dict[str, list[list[SimulatedRun]]]:
        """Return the runs by strategy and learning rate."""
        first = self.scenario.learning.seed + self.seeds
        tasks = [
            (self._at(number).with_seed(seed), sync, number)
            for sync in syncs
            for number in range(len(self.rates))
            for seed in range(first, first + (self.seeds + 1) // 2)
        ]
        found: dict[str, list[list[SimulatedRun]]] = {
            _name(sync): [[] for _ in self.rates] for sync in syncs
        }
        for number, run in self.run_all(tasks):
            found[_name(run.sync)][number].append(run)
            if self.progress is not None:
                self.progress(run.sync, 0)
        return found

    def _score(self, runs: Sequence[SimulatedRun], targets: Sequence[float]) -> tuple[float, float]:
        """Return the mean time to the targets, or the loss at the end where some did not get there.

        Args:
            runs: by seed.
            targets: losses, by seed.
        """
        times_s = [run.time_to_s(loss) for run, loss in zip(runs, targets, strict=True)]
        total = self.scenario.iterations * self.scenario.world.workers
        losses = [run.loss_after(total) for run in runs]
        mean_s = _mean(times_s)
        return (
            inf if mean_s is None else mean_s,
            inf if any(map(isnan, losses)) else fmean(losses),
        )


def learner_of(sync: Sync) -> Sync:
    """Return overlapped all-reduce for a strategy that computes the same weights, else itself."""
    is_exact = sync.strategy in ("all_reduce", "fused", "decoupled")
    return OVERLAPPED if is_exact or sync == EXACT_SERVER else sync


def _check(seeds: int, jobs: int, target_share: float) -> None:
    problems = []
    if not 1 <= seeds <= MOST_SEEDS:
        problems.append(f"seeds: {seeds} is not a whole number from 1 to {MOST_SEEDS}")
    if not 1 <= jobs <= MOST_JOBS:
        problems.append(f"jobs: {jobs} is not a whole number from 1 to {MOST_JOBS}")
    if not 0 < target_share <= 1:
        problems.append(f"target_share: {target_share:g} is not a fraction above 0, up to 1")
    if problems:
        raise PipeplanError(problems)


def _name(sync: Sync) -> str:
    return sync.model_dump_json()


def _targets(
    scenario: Scenario, runs: dict[str, list[SimulatedRun]], target_share: float
) -> list[float]:
    """Return the loss of overlapped all-reduce after a share of its iterations, by seed."""
    done = target_share * scenario.iterations * scenario.world.workers
    return [run.loss_after(done) for run in runs[_name(OVERLAPPED)]]


def _results(
    scenarios: dict[str, Scenario],
    syncs: Sequence[Sync],
    runs: dict[str, list[SimulatedRun]],
    target_share: float,
) -> tuple[SyncResult, ...]:
    plain, overlapped = runs[_name(PLAIN)], runs[_name(OVERLAPPED)]
    return tuple(
        _result(
            scenarios[name],
            runs[name],
            plain,
            overlapped,
            _targets(scenarios[name], runs, target_share),
        )
        for name in map(_name, syncs)
        if name in runs
    )


def _result(
    scenario: Scenario,
    runs: Sequence[SimulatedRun],
    plain: Sequence[SimulatedRun],
    overlapped: Sequence[SimulatedRun],
    targets: Sequence[float],
) -> SyncResult:
    total = scenario.iterations * scenario.world.workers

    def ratio(others: Sequence[SimulatedRun]) -> float:
        pairs = zip(runs, others, strict=True)
        return fmean(run.iterations_per_s / other.iterations_per_s for run, other in pairs)

    gaps = [run.spectral_gap for run in runs]
    target_s = _mean([run.time_to_s(loss) for run, loss in zip(runs, targets, strict=True)])
    rival_s = _mean([run.time_to_s(loss) for run, loss in zip(overlapped, targets, strict=True)])
    return SyncResult(
        sync=runs[0].sync,
        iterations_per_s=fmean(run.iterations_per_s for run in runs),
        throughput_ratio=ratio(plain),
        overlapped_ratio=ratio(overlapped),
        target_s=target_s,
        target_speedup=rival_s / target_s if target_s and rival_s else None,
        final_loss=fmean(run.loss_after(total) for run in runs),
        consensus_distance=fmean(run.consensus_distance for run in runs),
        spectral_gap=_mean(gaps),
        sent_bytes=fmean(run.sent_bytes for run in runs),
        idle_share=fmean(run.idle_share for run in runs),
        staleness=max(run.staleness for run in runs),
        steps=runs[0].done,
        learning_rate=scenario.learning.learning_rate,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
