"""How points are solved: in turn, in several processes of this machine, or on machines by Ray.

Ray (https://docs.ray.io) is an optional extra.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from planner.analysis.sweep.work import PointOutcome, Task, solve_task
from planner.errors import PipeplanError
from planner.search.settings import DEFAULT_WORKERS

MOST_PROCESSES = 1024
MOST_WORKERS = 8
"""All that CP-SAT's strategies make use of."""
CONNECT_S = 10.0
"""A cluster that does not answer so long is not there."""
IN_FLIGHT = 2
"""Tasks handed over for each that can run at once, so that no machine waits."""


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


class RayEngine:
    """Points as tasks of a Ray cluster, each on as many of its cores as the solver has threads.

    Pipeplan has to be installed on its machines, in the version that is here; the model has not:
    layer graphs travel with the tasks. A Ray that the program started itself is used as it is;
    else it is left as :meth:`run` ends.

    Args:
        address: ``auto`` for the cluster this machine belongs to, ``local`` to start one here,
            ``ray://HOST:PORT`` or ``HOST:PORT`` for another.

    Raises:
        PipeplanError: if Ray is not installed or there is no cluster at the address.
    """

    def __init__(self, address: str = "auto") -> None:
        self._ray = require_ray()
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            _connect(self._ray, address)

    @property
    def workers(self) -> int:
        """The cores of the largest machine, up to what a search makes use of."""
        return max(1, min(MOST_WORKERS, self._cores))

    @property
    def _cores(self) -> int:
        """Cores of the largest machine."""
        alive = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        return int(max(alive, default=0))

    def run(self, tasks: Sequence[Task]) -> Generator[PointOutcome, None, None]:
        """Yield outcomes in the order in which the tasks end.

        Raises:
            PipeplanError: if no machine has so many cores, or a task was lost with its machine.
        """
        ray = self._ray
        try:
            yield from self._run(tasks)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            raise PipeplanError(
                f"Ray lost a point ({type(error).__name__}: {error}); what was found is kept: run "
                "the sweep again"
            ) from None
        finally:
            if self._is_own:
                ray.shutdown()

    def _run(self, tasks: Sequence[Task]) -> Generator[PointOutcome, None, None]:
        ray, waiting = self._ray, list(reversed(tasks))
        _require_cores(tasks, self._cores)
        remote = ray.remote(solve_task)
        running: list[Any] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._room(waiting[-1]):
                    task = waiting.pop()
                    running.append(remote.options(num_cpus=task.workers).remote(task))
                done, running = ray.wait(running, num_returns=1)
                for outcome in done:
                    yield ray.get(outcome)
        finally:
            for outcome in running:
                ray.cancel(outcome, force=True)

    def _room(self, task: Task) -> int:
        """Return how many tasks may run now; machines may join meanwhile."""
        cores = self._ray.cluster_resources().get("CPU", 0)
        return max(1, IN_FLIGHT * int(cores // task.workers))


def require_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        PipeplanError: if it is not installed.
    """
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise PipeplanError(
            'ray: it is not installed; pip install "pipeplan[ray]", or leave ray out and give a '
            "number of processes"
        ) from None


def _connect(ray: Any, address: str) -> None:
    # A cluster that is started here sends no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _require_listener(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise PipeplanError(
            f"ray: no cluster at {address!r} ({reason}); start one with `ray start --head`, or "
            "give 'local' to start one on this machine"
        ) from None


def _require_listener(address: str) -> None:
    """Check that somebody listens: Ray itself would wait for minutes.

    Raises:
        OSError: if nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _require_cores(tasks: Sequence[Task], cores: int) -> None:
    """Refuse a task that no machine can take, which would wait for ever."""
    most = max((task.workers for task in tasks), default=0)
    if most > cores:
        raise PipeplanError(
            f"workers: {most} solver threads a point, the largest machine of the Ray cluster has "
            f"{cores} cores; give fewer workers"
        )
