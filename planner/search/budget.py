"""The budget of a search: its clock, what each unit of work costs on it, and how CP-SAT is run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from planner.search.settings import DEFAULT_WORKERS
from planner.simulation.ahead import compile_ahead

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


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
        """Return a CP-SAT solver with these settings that stops after ``limit_s``."""
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


class SearchWork(Enum):
    """Work that the clock charges in deterministic mode: what one unit is, and its seconds.

    The seconds are about what a unit takes on a core of 2020, for a mid-sized model. CP-SAT reports
    its own deterministic time, which is not in this table.
    """

    PLACED_STAGE = "a stage whose times, bytes and transfers are worked out", 2.5e-4
    SCHEDULED_OPERATION = "an operation, in all quick schedules with all choices to recompute", 3e-3
    ESTIMATED_OPERATION = "an operation, in one quick estimate or a few schedules", 3e-4
    SIMULATED_OPERATION = "an operation, in list schedules and their replay", 6e-5
    REPLAYED_EVENT = "an operation or transfer, in the replay of given orders", 2e-5
    NOISY_EVENT = "an operation or transfer, in one sample of a vectorised replay", 2e-8
    PARTITION_BOUND = "a bound on all schedules of a partition, stage by stage", 1e-3
    QUICK_BOUND = "a bound on a partition from tables of intervals", 1e-4
    COLUMN_STATE = "a layer with the crossings and load left, in the knapsack of a device", 2e-8
    ORDER_PROGRAM_ROW = "a row of the dynamic program along an order of devices", 5e-5

    CERTIFICATE_STAGE = "a stage of a state in a pass of planner.bounds", 1e-7

    def __init__(self, unit: str, seconds: float) -> None:
        self.unit = unit
        self.seconds = seconds


class Clock:
    """Time left of a limit: by the wall clock, or by the deterministic time that was spent.

    In deterministic mode only :meth:`spend` and :meth:`charge` move it on, so decisions that depend
    on the time left are the same on every machine.
    """

    def __init__(
        self,
        limit_s: float,
        deterministic: bool,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        compile_ahead()
        self.limit_s = limit_s
        self._deterministic = deterministic
        self._now = now
        self._start, self._processor_start = now(), time.process_time()
        self._spent = 0.0
        self.is_stopped = False

    def stop(self) -> None:
        """Leave no time from now on: the user asked to stop."""
        self.is_stopped = True

    def spend(self, deterministic_s: float) -> None:
        """Add deterministic time that a solver reported."""
        self._spent += deterministic_s

    def charge(self, unit: SearchWork, count: float = 1) -> None:
        """Add the deterministic time of so many units of work."""
        self._spent += unit.seconds * count

    @property
    def elapsed_s(self) -> float:
        """Time used so far."""
        return self._spent if self._deterministic else self._now() - self._start

    @property
    def processor_share(self) -> float | None:
        """Seconds of a core that this process had in each second; None in deterministic mode."""
        if self._deterministic:
            return None
        return (time.process_time() - self._processor_start) / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float:
        """Time left; zero or less once the limit is reached."""
        return 0.0 if self.is_stopped else self.limit_s - self.elapsed_s

    def may_go_on(self, until_s: float) -> bool:
        """Return whether work that has begun may take longer.

        In deterministic mode it may until the clock is stopped: it was charged as a whole.

        Args:
            until_s: elapsed time.
        """
        return not self.is_stopped and (self._deterministic or self.elapsed_s < until_s)


@dataclass(frozen=True)
class TimeSlice:
    """The part of a clock's time that one step of a search may use.

    Attributes:
        clock: of the whole search.
        end_s: elapsed time of the clock at which the step gives way to the next.
    """

    clock: Clock
    end_s: float

    def first(self, limit_s: float) -> TimeSlice:
        """Return the first so much of the time that is left."""
        return TimeSlice(self.clock, min(self.end_s, self.clock.elapsed_s + limit_s))

    @property
    def left_s(self) -> float:
        """Time left for the step, at most that of the whole search."""
        return min(self.end_s - self.clock.elapsed_s, self.clock.left_s)

    def has_time(self) -> bool:
        """Return whether the step may go on."""
        return self.left_s > 0


@dataclass(frozen=True)
class TimeShare:
    """A step's share of the time limit.

    Attributes:
        share: of that time.
        of: ``whole``: until so much of the whole limit is spent, by all steps together; ``left``:
            of the time left when the step begins; ``beyond``: of the whole limit, after its end.
    """

    share: float
    of: Literal["whole", "left", "beyond"] = "left"

    def slice_of(self, clock: Clock) -> TimeSlice:
        """Return the time of a step that begins now."""
        if self.of == "whole":
            return TimeSlice(clock, self.share * clock.limit_s)
        if self.of == "left":
            return TimeSlice(clock, clock.limit_s - (1 - self.share) * clock.left_s)
        return TimeSlice(clock, max(clock.elapsed_s, clock.limit_s) + self.share * clock.limit_s)


def run_solver(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    clock: Clock,
    callback: cp_model.CpSolverSolutionCallback | None = None,
) -> cp_model.CpSolverStatus:
    """Solve a model and spend its deterministic time on the clock.

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
