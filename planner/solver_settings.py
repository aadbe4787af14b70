"""How CP-SAT is run: time, workers, seed, the same answer every time, and a way to stop it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


DEFAULT_WORKERS = max(2, min(8, os.cpu_count() or 2))
"""One for each core, up to the eight that have CP-SAT use all of its strategies."""


@dataclass(frozen=True)
class Settings:
    """Solver settings.

    Attributes:
        seed: of CP-SAT's searches.
        workers: threads; deterministic mode always uses one.
        deterministic: limit by CP-SAT's deterministic time instead of the clock, so that the same
            input gives the same plan on every machine.
    """

    seed: int = 0
    workers: int = DEFAULT_WORKERS
    deterministic: bool = False

    def solver(self, limit_s: float) -> cp_model.CpSolver:
        """A CP-SAT solver under these settings that stops after ``limit_s``."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.random_seed = self.seed
        # It would end one search and let the next begin; run_solver ends all of them.
        solver.parameters.catch_sigint_signal = False
        # Probing in presolve of OR-Tools 9.15 calls some feasible models infeasible (one is kept in
        # tests/solver/probed_infeasible.txt), which would prove what is false.
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.num_workers = 1 if self.deterministic else self.workers
        if solver.parameters.num_workers == 1:
            # Without the relaxation's bounds a lone worker may creep up tick by tick, for minutes.
            solver.parameters.linearization_level = 2
        if self.deterministic:
            solver.parameters.max_deterministic_time = max(limit_s, 1e-3)
        else:
            solver.parameters.max_time_in_seconds = max(limit_s, 1e-3)
        return solver


class Clock:
    """Time left of a limit: by the wall clock, or by the deterministic time that was spent.

    In deterministic mode only :meth:`spend` moves it on, so decisions that depend on the time
    left are the same on every machine.
    """

    def __init__(
        self,
        limit_s: float,
        deterministic: bool,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit_s = limit_s
        self._deterministic = deterministic
        self._now = now
        self._start = now()
        self._spent = 0.0
        self.is_stopped = False

    def stop(self) -> None:
        """No time is left from now on: the user asked to stop."""
        self.is_stopped = True

    def spend(self, deterministic_s: float) -> None:
        """Book deterministic time a solver reported, or estimated work."""
        self._spent += deterministic_s

    @property
    def elapsed_s(self) -> float:
        """Time used so far."""
        return self._spent if self._deterministic else self._now() - self._start

    @property
    def left_s(self) -> float:
        """Time left; zero or less once the limit is reached."""
        return 0.0 if self.is_stopped else self._limit_s - self.elapsed_s


def run_solver(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    clock: Clock,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> cp_model.CpSolverStatus:
    """Solve a model and book the deterministic time on the clock.

    Ctrl-C ends this search with what it has found and stops the clock. CP-SAT runs in a thread of
    its own for that: Python handles no signal while the main thread is inside the solver.

    Raises:
        AssertionError: if CP-SAT calls the model invalid.
    """
    from ortools.sat.python import cp_model

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(solver.solve, model, callback)
        try:
            status = running.result()
        except KeyboardInterrupt:
            clock.stop()
            solver.stop_search()
            status = running.result()
    clock.spend(solver.response_proto.deterministic_time)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(f"CP-SAT calls the model invalid: {model.validate()}")
    return status
