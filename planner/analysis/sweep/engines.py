"""How points are solved: in turn, in several processes of this machine, or on machines by Ray.

Ray (https://docs.ray.io) is an optional extra.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Protocol

from planner.analysis.sweep.work import Task, solve_task
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.sweep_index import SweptPoint
from planner.search.settings import DEFAULT_WORKERS

MOST_PROCESSES = 1024
MOST_WORKERS = 8
"""All that CP-SAT's strategies make use of."""
CONNECT_S = 10.0
"""How long a Ray cluster may take to accept a connection."""
IN_FLIGHT = 2
"""Tasks given to Ray for each that can run at once, so that no machine waits."""

Outcomes = Generator[tuple[SweptPoint, Plan | None], None, None]


class Engine(Protocol):
    """Runs :func:`~planner.analysis.sweep.work.solve_task` for many tasks."""

    @property
    def workers(self) -> int:
        """Solver threads of a task that make use of the machines and do not overload them."""

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        """Yield outcomes in any order; closing the generator ends the tasks that still run."""


@dataclass(frozen=True)
class InTurn:
    """Solves one task after the other, in this process."""

    workers: int = DEFAULT_WORKERS

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        """Yield outcomes in the order of the tasks."""
        yield from map(solve_task, tasks)


@dataclass(frozen=True)
class Processes:
    """Solves tasks in several fresh processes.

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

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        """Yield outcomes in the order in which the tasks end.

        Raises:
            PipeplanError: if a process was killed.
        """
        # Ctrl-C reaches all processes of a terminal; the first one ends the others.
        pool = ProcessPoolExecutor(
            self.number, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
        )
        try:
            for future in as_completed([pool.submit(solve_task, task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool:
            raise PipeplanError(
                "a process of the sweep was killed, perhaps for want of memory; what was found is "
                "kept: run the sweep again, with fewer processes"
            ) from None
        finally:
            # The pool itself would wait for the points that are being solved.
            for process in [*(pool._processes or {}).values()]:
                process.terminate()
            pool.shutdown(cancel_futures=True)


class RayEngine:
    """Points as tasks of a Ray cluster, each on as many of its cores as the solver has threads.

    Pipeplan has to be installed on its machines, in the version that is here; the model does not:
    layer graphs travel with the tasks. A Ray that the program started itself is used as it is;
    otherwise the connection is closed when :meth:`run` ends.

    Args:
        address: ``auto`` for the cluster this machine belongs to, ``local`` to start one here,
            ``ray://HOST:PORT`` or ``HOST:PORT`` for another.

    Raises:
        PipeplanError: if Ray is not installed or there is no cluster at the address.
    """

    def __init__(self, address: str = "auto") -> None:
        self._ray = _require_ray()
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            _connect(self._ray, address)

    @property
    def workers(self) -> int:
        """The cores of the largest machine, up to what a search makes use of."""
        cores = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        return max(1, min(MOST_WORKERS, int(max(cores, default=0))))

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        """Yield outcomes in the order in which the tasks end.

        Raises:
            PipeplanError: if a task was lost with its machine.
        """
        ray, remote = self._ray, self._ray.remote(solve_task)
        waiting = [*reversed(tasks)]
        running: list[Any] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._room(waiting[-1]):
                    task = waiting.pop()
                    running.append(remote.options(num_cpus=task.workers).remote(task))
                done, running = ray.wait(running)
                yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            raise PipeplanError(
                f"Ray lost a point ({type(error).__name__}: {error}); what was found is kept: run "
                "the sweep again"
            ) from None
        finally:
            for task in running:
                ray.cancel(task, force=True)
            if self._is_own:
                ray.shutdown()

    def _room(self, task: Task) -> int:
        """Return how many tasks may be given to Ray now; machines may join meanwhile."""
        cores = self._ray.cluster_resources().get("CPU", 0)
        return max(1, IN_FLIGHT * int(cores // task.workers))


def _require_ray() -> Any:
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
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            # Ray itself waits for minutes if nothing listens there.
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise PipeplanError(
            f"ray: no cluster at {address!r} ({reason}); start one with `ray start --head`, or "
            "give 'local' to start one on this machine"
        ) from None
