"""Simulated runs in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync

Task = tuple[Scenario, Sync, int]
"""A scenario, a strategy, and a number that comes back with the run."""
RunAll = Callable[[Sequence[Task]], Iterator[tuple[int, SimulatedRun]]]


@contextmanager
def runner(jobs: int) -> Iterator[RunAll]:
    """Yield what runs tasks, and yields their runs in order.

    Args:
        jobs: number of processes; 1: this one.
    """
    if jobs == 1:
        yield lambda tasks: map(_run, tasks)
        return
    with _single_threaded(), _pool(jobs) as pool:
        # Not pool.map: what it cancels when interrupted, Python 3.11 stumbles over.
        yield lambda tasks: _results_of([pool.submit(_run, task) for task in tasks])


def _results_of(
    futures: Sequence[Future[tuple[int, SimulatedRun]]],
) -> Iterator[tuple[int, SimulatedRun]]:
    for future in futures:
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


def _run(task: Task) -> tuple[int, SimulatedRun]:
    scenario, sync, index = task
    return index, simulate_sync(scenario, sync)


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
