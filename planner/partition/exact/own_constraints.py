"""Partitions that keep constraints of one's own: found, and checked."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model

from planner.costs.placement import StageSpec
from planner.partition.chain import Chain, StageChoice
from planner.partition.exact.decisions import Decisions, Form, Stages
from planner.partition.exact.search import Constrain


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
        constrain(self._decisions)

    def keeps(self, stages: Stages) -> bool:
        """Whether the stages keep them. The constraints know one stage a device only.

        CP-SAT looks for values of whatever variables the constraints brought along, with the
        stages and their devices fixed.
        """
        devices = [device for stage in stages for device in stage.devices]
        if len(set(devices)) < len(devices) or len(stages) > len(self._decisions.stages):
            return False
        if self._decisions.form == "chain" and not _are_intervals(stages, self._decisions):
            return False
        model = self._decisions.model
        model.clear_hints()  # type: ignore[no-untyped-call]
        for variable, value in self._decisions.values_of(stages):
            model.add_hint(variable, value)
        solver = cp_model.CpSolver()
        solver.parameters.fix_variables_to_their_hinted_value = True
        solver.parameters.num_workers = 1
        return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _are_intervals(stages: Stages, decisions: Decisions) -> bool:
    begin = 0
    for stage in stages:
        end = _end(stage, begin, decisions)
        if end is None:
            return False
        begin = end
    return begin == decisions.chain.length


def _end(stage: StageChoice | StageSpec, begin: int, decisions: Decisions) -> int | None:
    """Where a stage ends, if it is an interval that begins here."""
    if isinstance(stage, StageChoice):
        return stage.end if stage.begin == begin else None
    positions: Sequence[int] = sorted(decisions.position(layer) for layer in stage.layers)
    end = begin + len(positions)
    return end if positions == list(range(begin, end)) else None
