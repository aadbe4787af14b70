"""Stage boundaries, device sets and replica counts as one CP-SAT model over the chain of layers.

The "position" form: boundaries are integers, sums over layers are looked up by position. The
objective is planner.partition.bounds.schedule_bound_s, which holds for every schedule, so the
model's own bound holds for every plan with at most one stage a device. All durations are rounded
down and all relaxations lean the same way.
"""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.exact.decisions import Decisions
from planner.partition.exact.objective import IterationBound
from planner.partition.exact.tails import StageTails
from planner.partition.exact.times import StageTimes
from planner.partition.exact.transfers import StageTransfers
from planner.solver_settings import Clock, run_solver


class PartitionModel:
    """The partition model; ``model`` and ``decisions`` are public, to add constraints to.

    Args:
        chain: the layers.
        horizon_s: time of a known plan; nothing slower is looked for.
        max_stages: the largest number of stages.

    Attributes:
        decisions: boundaries and device literals.
        objective: the bound on the iteration time, in ticks of ``tick_s`` seconds.
    """

    def __init__(self, chain: Chain, horizon_s: float, max_stages: int) -> None:
        self.decisions = Decisions(chain, horizon_s, max_stages)
        self.times = StageTimes(self.decisions)
        self.transfers = StageTransfers(self.decisions)
        self.tails = StageTails(self.decisions, self.times)
        self.objective = IterationBound(
            self.decisions, self.times, self.transfers, self.tails
        ).value
        self.model.minimize(self.objective)

    @property
    def model(self) -> cp_model.CpModel:
        """The CP-SAT model."""
        return self.decisions.model

    @property
    def tick_s(self) -> float:
        """Seconds of a tick."""
        return self.decisions.tick_s

    def forbid(self, partition: Partition) -> None:
        """Exclude one partition, to go on to the next best."""
        differences: list[cp_model.LiteralT] = []
        for j in self.decisions.stages:
            if j:
                differs = self.model.new_bool_var("")
                cut = self.decisions.boundary[j]
                self.model.add(cut != self._begin(partition, j)).only_enforce_if(differs)
                differences.append(differs)
            for d in range(len(self.decisions.devices)):
                literal = self.decisions.on[j, d]
                differences.append(~literal if self._holds(partition, j, d) else literal)
        self.model.add_bool_or(differences)

    def hint(self, partition: Partition) -> None:
        """Suggest the decisions of a partition."""
        self._clear_hints()
        for j in range(len(self.decisions.stages) + 1):
            self.model.add_hint(self.decisions.boundary[j], self._begin(partition, j))
        for (j, d), literal in self.decisions.on.items():
            self.model.add_hint(literal, self._holds(partition, j, d))

    def complete_hint(self, solver: cp_model.CpSolver, clock: Clock) -> bool:
        """Solve with the hinted decisions fixed and hint all variables of what comes out.

        CP-SAT often drops a hint that leaves auxiliary variables open.
        """
        solver.parameters.fix_variables_to_their_hinted_value = True
        status = run_solver(solver, self.model, clock)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._clear_hints()
            return False
        values = list(solver.response_proto.solution)
        self._clear_hints()
        for index, value in enumerate(values):
            self.model.add_hint(self.model.get_int_var_from_proto_index(index), value)
        return True

    def _clear_hints(self) -> None:
        self.model.clear_hints()  # type: ignore[no-untyped-call]

    def _begin(self, partition: Partition, j: int) -> int:
        return partition[j].begin if j < len(partition) else self.decisions.chain.length

    def _holds(self, partition: Partition, j: int, d: int) -> bool:
        return j < len(partition) and self.decisions.devices[d] in partition[j].devices

    def partition(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> Partition:
        """The partition of a solution."""
        decisions = self.decisions
        stages = []
        for j in decisions.stages:
            begin = value.value(decisions.boundary[j])
            end = value.value(decisions.boundary[j + 1])
            if end > begin:
                held = [
                    x for d, x in enumerate(decisions.devices) if value.value(decisions.on[j, d])
                ]
                stages.append(StageChoice(begin, end, tuple(held)))
        return tuple(stages)
