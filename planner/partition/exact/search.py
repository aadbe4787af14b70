"""Partitions in order of their bound, by CP-SAT, and the bound on all that are left."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from planner.partition.chain import Chain, Partition
from planner.partition.exact.model import PartitionModel
from planner.solver_settings import Clock, Settings, run_solver


@dataclass(frozen=True)
class Found:
    """One search: new partitions, the best last, and a bound on every plan of the problem.

    ``is_exhausted``: no partition is left that could beat the incumbent.
    """

    partitions: tuple[Partition, ...]
    bound_s: float
    is_exhausted: bool


class _Collector(cp_model.CpSolverSolutionCallback):
    """Keeps the partition of every solution on the way."""

    def __init__(self, model: PartitionModel) -> None:
        super().__init__()
        self._model = model
        self.found: list[Partition] = []

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        self.found.append(self._model.partition(self))


class PartitionSearch:
    """Enumerates partitions by their bound.

    A partition that was scheduled is excluded together with what was proved of its schedules;
    the bound on every plan is the least of those and of the model's bound on the rest.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        settings: of CP-SAT.
        clock: deterministic time is booked on it.
        known: the search starts from it, if there is one.
        horizon_s: nothing slower is looked for.
    """

    def __init__(
        self,
        chain: Chain,
        max_stages: int,
        settings: Settings,
        clock: Clock,
        known: Partition | None,
        horizon_s: float,
    ) -> None:
        self.horizon_s = horizon_s
        self.model = PartitionModel(chain, horizon_s * (1 + 1e-6), max_stages)
        self._hint = known
        self._settings = settings
        self._clock = clock
        self._rest_s = 0.0
        self.excluded: dict[Partition, float] = {}

    @property
    def bound_s(self) -> float:
        """No plan is faster."""
        return min([self._rest_s, *self.excluded.values()])

    def exclude(self, partition: Partition, proved_s: float) -> None:
        """Go on without a partition none of whose schedules is faster than ``proved_s``."""
        if partition not in self.excluded:
            self.model.forbid(partition)
        self.excluded[partition] = max(proved_s, self.excluded.get(partition, 0.0))

    def next(self, incumbent_s: float, limit_s: float) -> Found:
        """The partition with the smallest bound among those left that can beat the incumbent."""
        ticks = int(incumbent_s / self.model.tick_s)
        self.model.model.add(self.model.objective <= ticks)
        if self._hint is not None:
            self.model.hint(self._hint)
            completing = self._settings.solver(min(5.0, 0.2 * limit_s))
            self.model.complete_hint(completing, self._clock)
        solver = self._settings.solver(limit_s)
        collector = _Collector(self.model)
        status = run_solver(solver, self.model.model, self._clock, collector)
        if status == cp_model.INFEASIBLE:
            # What is left cannot beat the incumbent.
            self._rest_s = incumbent_s
            return Found((), self.bound_s, is_exhausted=True)
        bound = max(solver.best_objective_bound, 0) * self.model.tick_s
        self._rest_s = max(self._rest_s, bound)
        partitions = tuple(dict.fromkeys(collector.found))
        return Found(partitions, self.bound_s, is_exhausted=False)
