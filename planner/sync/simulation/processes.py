"""Simulated runs in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync

Task = tuple[Scenario, Sync]
RunAll = Callable[[Sequence[Task]], Iterator[SimulatedRun]]


@contextmanager
def runner(jobs: int) -> Iterator[RunAll]:
    """Yield what runs tasks, and yields their runs in order.

    Args:
        jobs: number of processes; 1: this one. All are terminated at the end, whatever they do.
    """
    if jobs == 1:
        yield lambda tasks: (simulate_sync(*task) for task in tasks)
        return
    # Started afresh, not forked: threads of libraries do not survive a fork.
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    with _single_threaded(), ProcessPoolExecutor(jobs, context, _leave_interrupts) as pool:
        try:
            # Not pool.map: what it cancels when interrupted, Python 3.11 stumbles over.
            yield lambda tasks: (
                future.result() for future in [pool.submit(simulate_sync, *t) for t in tasks]
            )
        except BrokenProcessPool:
            raise PipeplanError(
                "jobs: a process ended by itself; a script that simulates in several processes "
                "does so under if __name__ == '__main__', or gives jobs=1"
            ) from None
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _leave_interrupts() -> None:
    """Ignore Ctrl-C, which the parent handles by ending the other processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Limit processes started meanwhile to one thread each for linear algebra."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
