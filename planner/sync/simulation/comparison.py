"""Comparison of several strategies in one scenario against all-reduce, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync
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
            "semi_decentralized",
            "semi_decentralized:overlap=true",
        ),
    ),
)
"""Every strategy, in each of its forms."""
MOST_SEEDS = 1000
MOST_JOBS = 256
Progress = Callable[[Sync, int], None]
"""Called when a strategy and seed is done."""
_Task = tuple[Scenario, Sync, int, int]


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
        progress: called after every run.

    Raises:
        PipeplanError: if an argument is out of range, or a strategy or an option is wrong.
    """
    _check(seeds, jobs, target_share)
    for sync in syncs:
        require_fit(sync, scenario.world.workers)
    wanted = list({_name(sync): sync for sync in (PLAIN, OVERLAPPED, *syncs)}.values())
    tasks = [
        (scenario, sync, index, scenario.learning.seed + seed)
        for index, sync in enumerate(wanted)
        for seed in range(seeds)
    ]
    found: dict[int, list[SimulatedRun]] = {}
    interrupted = False
    try:
        for index, run in _finished(tasks, jobs):
            found.setdefault(index, []).append(run)
            if progress is not None:
                progress(run.sync, len(found[index]))
    except KeyboardInterrupt:
        interrupted = True
    whole = {_name(wanted[index]): runs for index, runs in found.items() if len(runs) == seeds}
    if _name(PLAIN) not in whole or _name(OVERLAPPED) not in whole:
        raise KeyboardInterrupt
    return _comparison(scenario, syncs, whole, target_share, interrupted)


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


def _finished(tasks: list[_Task], jobs: int) -> Iterator[tuple[int, SimulatedRun]]:
    """Yield runs in the order of tasks."""
    jobs = min(jobs, len(tasks))
    if jobs == 1:
        yield from map(_run, tasks)
        return
    with _single_threaded(), _pool(jobs) as pool:
        # Not pool.map: what it cancels when interrupted, Python 3.11 stumbles over.
        for future in [pool.submit(_run, task) for task in tasks]:
            yield future.result()


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that is terminated at the end, whatever they are doing."""
    # Started afresh, not forked: threads of libraries do not survive a fork.
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, context, _leave_interrupts) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise PipeplanError(
                "jobs: a process ended by itself; a script that simulates in several processes "
                "does so under if __name__ == '__main__', or gives jobs=1"
            ) from None
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _run(task: _Task) -> tuple[int, SimulatedRun]:
    scenario, sync, index, seed = task
    return index, simulate_sync(scenario.with_seed(seed), sync)


def _leave_interrupts() -> None:
    """Ignore Ctrl-C, which the parent handles by ending the other processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Limit processes started meanwhile to one thread each for linear algebra."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _comparison(
    scenario: Scenario,
    syncs: Sequence[Sync],
    runs: dict[str, list[SimulatedRun]],
    target_share: float,
    interrupted: bool,
) -> SyncComparison:
    plain, overlapped = runs[_name(PLAIN)], runs[_name(OVERLAPPED)]
    total = scenario.iterations * scenario.world.workers
    targets = [run.loss_after(target_share * total) for run in overlapped]
    results = tuple(
        _result(runs[_name(sync)], plain, overlapped, targets, total)
        for sync in syncs
        if _name(sync) in runs
    )
    return SyncComparison(scenario, len(targets), fmean(targets), results, interrupted)


def _result(
    runs: Sequence[SimulatedRun],
    plain: Sequence[SimulatedRun],
    overlapped: Sequence[SimulatedRun],
    targets: Sequence[float],
    total: int,
) -> SyncResult:
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
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
