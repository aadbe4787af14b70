"""How points are solved: one after the other, or several at once in processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Protocol

from planner.analysis.sweep.work import PointOutcome, Task, solve_task
from planner.errors import PipeplanError
from planner.search.budget import DEFAULT_WORKERS

MOST_PROCESSES = 1024


class Engine(Protocol):
    """Runs :func:`~planner.analysis.sweep.work.solve_task` for many tasks."""

    @property
    def workers(self) -> int:
        """Solver threads of a task that make use of the machines and do not overload them."""

    def run(self, tasks: Sequence[Task]) -> Generator[PointOutcome, None, None]:
        """Yield outcomes in any order; closing the generator ends what still runs."""


@dataclass(frozen=True)
class InTurn:
    """Solves one task after the other, in this process."""

    @property
    def workers(self) -> int:
        """Threads: all that a search makes use of."""
        return DEFAULT_WORKERS

    def run(self, tasks: Sequence[Task]) -> Generator[PointOutcome, None, None]:
        """Yield outcomes in the order of the tasks."""
        for task in tasks:
            yield solve_task(task)


@dataclass(frozen=True)
class Processes:
    """Solves tasks in several fresh processes, which end with this one however it ends.

    A script that uses it needs the usual ``if __name__ == "__main__":``.

    Attributes:
        number: of processes, which solve a point each.

    Raises:
        PipeplanError: if that is out of range.
    """

    number: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MOST_PROCESSES:
            raise PipeplanError(
                f"processes: {self.number} is not a whole number from 1 to {MOST_PROCESSES}"
            )

    @property
    def workers(self) -> int:
        """The cores of the machine, divided among the processes."""
        return max(1, min(DEFAULT_WORKERS, (os.cpu_count() or 1) // self.number))

    def run(self, tasks: Sequence[Task]) -> Generator[PointOutcome, None, None]:
        """Yield outcomes in the order in which the tasks end.

        Raises:
            PipeplanError: if a process was killed.
        """
        if not tasks:
            return
        context = get_context("spawn")
        lifeline, held = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(
            min(self.number, len(tasks)), context, initializer=_follow, initargs=(lifeline,)
        )
        try:
            with _deaf_to_ctrl_c():
                futures = [pool.submit(solve_task, task) for task in tasks]
            for future in as_completed(futures):
                yield future.result()
            pool.shutdown()
        except BrokenProcessPool:
            raise PipeplanError(
                "a process of the sweep was killed, perhaps for want of memory; what was found is "
                "kept: run the sweep again, with fewer processes"
            ) from None
        finally:
            # Processes that still run end at once, and with them their points.
            held.close()
            pool.shutdown()
            lifeline.close()


def _follow(lifeline: Connection) -> None:
    """Prepare a process of the pool: it leaves Ctrl-C to the first process and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    ends: list[Connection | int] = [lifeline]
    if parent is not None:
        ends.append(parent.sentinel)

    def watch() -> None:
        wait(ends)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Make processes that are started meanwhile ignore Ctrl-C from their first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
