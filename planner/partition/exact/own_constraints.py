"""Partitions that keep constraints of one's own: found, and checked."""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.partition.chain import Chain
from planner.partition.exact.decisions import Decisions, Form, Stages
from planner.partition.exact.search import Constrain, add_own


class ConstraintCheck:
    """Says of given partitions whether they keep added constraints.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        constrain: adds the constraints to ``decisions.model``.
        form: of the stages that will be asked for.
    """

    def __init__(
        self, chain: Chain, max_stages: int, constrain: Constrain, form: Form = "chain"
    ) -> None:
        self._decisions = Decisions(chain, 1.0, max_stages, form=form, break_symmetry=False)
        add_own(constrain, self._decisions)

    def keeps(self, stages: Stages) -> bool:
        """Whether the stages keep them. The constraints know one stage a device only.

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
