"""Partitions in order of their bound, by CP-SAT, and the bound on all that are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from planner.errors import PipeplanError
from planner.search.budget import Clock, Settings, run_solver
from planner.search.partition.chain import Chain, Partition, without_recompute
from planner.search.partition.cp_sat.decisions import Decisions, Stages
from planner.search.partition.cp_sat.model import PartitionModel

Constrain = Callable[[Decisions], object]
"""Adds constraints of one's own to ``decisions.model``."""
PRECISION = 1e-5
"""A search ends when its bound is this near its best solution, relative."""


@dataclass(frozen=True)
class Found:
    """One search: new partitions, the best last, and a bound on every plan of the problem.

    Attributes:
        partitions: nothing recomputed.
        bound_s: no plan is faster.
        is_exhausted: no partition is left that could beat the incumbent.
        recomputed: the same partitions with what the model would have them recompute, where
            memory could bind.
    """

    partitions: tuple[Partition, ...]
    bound_s: float
    is_exhausted: bool
    recomputed: tuple[Partition, ...] = ()


def add_own(constrain: Constrain, decisions: Decisions) -> None:
    """Let constraints of one's own be added.

    Raises:
        PipeplanError: if the function returns what it should have added.
    """
    returned = constrain(decisions)
    if isinstance(returned, (bool, cp_model.IntVar, cp_model.BoundedLinearExpression)):
        raise PipeplanError(
            f"constrain: returned {returned}, which adds nothing; add it with "
            "decisions.model.add(…) and return nothing"
        )


class _Collector(cp_model.CpSolverSolutionCallback):
    """Keeps the partition of every solution on the way."""

    def __init__(self, model: PartitionModel) -> None:
        super().__init__()
        self._model = model
        self.found: dict[Partition, Partition] = {}

    def on_solution_callback(self) -> None:
        """Called by the solver."""
        recomputed = self._model.recomputed(self)
        plain = without_recompute(recomputed)
        self.found.pop(plain, None)  # The best last.
        self.found[plain] = recomputed


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
        least_s: a proven bound on every plan.
        constrain: adds constraints that every partition has to keep; the bound then is one on the
            plans that keep them.
    """

    def __init__(
        self,
        chain: Chain,
        max_stages: int,
        settings: Settings,
        clock: Clock,
        known: Partition | None,
        horizon_s: float,
        *,
        least_s: float = 0.0,
        constrain: Constrain | None = None,
    ) -> None:
        self.horizon_s = horizon_s
        self.model = PartitionModel(
            chain,
            horizon_s * (1 + 1e-6),
            max_stages,
            least_s=least_s,
            break_symmetry=constrain is None,
        )
        if constrain is not None:
            add_own(constrain, self.model.decisions)
        self._hint = known if known and self.model.decisions.has(known) else None
        self._settings = settings
        self._clock = clock
        self._least_s = least_s
        self._rest_s = least_s
        self.excluded: dict[Partition, float] = {}

    @property
    def bound_s(self) -> float:
        """No plan is faster."""
        return max(self._least_s, min([self._rest_s, *self.excluded.values()]))

    def exclude(self, partition: Partition, proved_s: float) -> None:
        """Go on without a partition none of whose schedules is faster than ``proved_s``."""
        if partition not in self.excluded and self.model.decisions.has(partition):
            self.model.forbid(partition)
        self.excluded[partition] = max(proved_s, self.excluded.get(partition, 0.0))

    def next(self, incumbent_s: float, limit_s: float) -> Found:
        """Return the partition of least bound among those left that can beat the incumbent."""
        ticks = int(incumbent_s / self.model.tick_s)
        self.model.model.add(self.model.objective <= ticks)
        if self._hint is not None:
            self.model.hint(self._hint)
            completing = self._settings.solver(min(5.0, 0.2 * limit_s))
            self.model.complete_hint(completing, self._clock)
        solver = self._settings.solver(limit_s)
        solver.parameters.relative_gap_limit = PRECISION
        collector = _Collector(self.model)
        status = run_solver(solver, self.model.model, self._clock, collector)
        if status == cp_model.INFEASIBLE:
            # What is left cannot beat the incumbent.
            self._rest_s = max(self._rest_s, incumbent_s)
            return Found((), self.bound_s, is_exhausted=True)
        bound = max(solver.best_objective_bound, 0) * self.model.tick_s
        self._rest_s = max(self._rest_s, bound)
        return Found(
            tuple(collector.found),
            self.bound_s,
            is_exhausted=False,
            recomputed=tuple(collector.found.values()),
        )


class ConstraintCheck:
    """Says of given partitions whether they keep added constraints.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        constrain: adds the constraints to ``decisions.model``.
    """

    def __init__(self, chain: Chain, max_stages: int, constrain: Constrain) -> None:
        self._decisions = Decisions(chain, 1.0, max_stages, break_symmetry=False)
        add_own(constrain, self._decisions)

    def keeps(self, stages: Stages) -> bool:
        """Return whether the stages keep them. The constraints know one stage a device only.

        CP-SAT looks for values of whatever variables the constraints brought along, with the
        stages and their devices fixed.
        """
        if not self._decisions.has(stages):
            return False
        model = self._decisions.model
        model.clear_hints()  # type: ignore[no-untyped-call]
        for variable, value in self._decisions.values_of(stages):
            model.add_hint(variable, value)
        solver = cp_model.CpSolver()
        solver.parameters.fix_variables_to_their_hinted_value = True
        solver.parameters.num_workers = 1
        return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
