"""Stages, device sets, replica counts and recomputation as one CP-SAT model.

The objective is planner.partition.bounds.schedule_bound_s, which holds for every schedule, so the
model's own bound holds for every plan with at most one stage a device. All durations are rounded
down and all relaxations lean the same way.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ortools.sat.python import cp_model

from planner.costs.placement import StageSpec
from planner.partition.chain import Chain, Partition, StageChoice
from planner.partition.exact.decisions import FINE, Decisions, Form, Stages
from planner.partition.exact.layer_stages import Literal, Values
from planner.partition.exact.memory import StageMemory, memory_may_bind
from planner.partition.exact.objective import IterationBound
from planner.partition.exact.recomputation import Recomputation
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
        least_s: a proven bound on every plan; the objective is not below it.
        form: of the stages: ``chain``, intervals of the file's order; ``graph``, any sets of
            layers that no edge leaves backwards.
        break_symmetry: look at one of the orders of interchangeable devices only. Constraints
            that name devices need it off.

    Attributes:
        decisions: literals of layers and devices.
        memory: microbatches in flight, where memory could bind within the horizon.
        objective: the bound on the iteration time, in ticks of ``tick_s`` seconds.
    """

    def __init__(
        self,
        chain: Chain,
        horizon_s: float,
        max_stages: int,
        *,
        least_s: float = 0.0,
        form: Form = "chain",
        break_symmetry: bool = True,
    ) -> None:
        self.decisions = Decisions(
            chain, horizon_s, max_stages, form=form, break_symmetry=break_symmetry
        )
        binds = memory_may_bind(chain, horizon_s, form)
        self._recomputation = Recomputation(self.decisions) if binds else None
        self.times = StageTimes(self.decisions, self._recomputation)
        self.transfers = StageTransfers(self.decisions)
        self.tails = StageTails(self.decisions, self.times)
        self.memory: StageMemory | None = None
        if self._recomputation is not None:
            self.memory = StageMemory(self.decisions, self.times, self._recomputation)
        self.objective = IterationBound(
            self.decisions, self.times, self.transfers, self.tails, self.memory
        ).value
        self.model.add(self.objective >= math.floor(min(least_s, horizon_s) / self.tick_s))
        self.model.minimize(self.objective)

    @property
    def model(self) -> cp_model.CpModel:
        """The CP-SAT model."""
        return self.decisions.model

    @property
    def tick_s(self) -> float:
        """Seconds of a tick of the objective."""
        return self.decisions.tick_s * FINE

    # --- going on from a partition -----------------------------------------------------------

    def forbid(self, stages: Stages) -> None:
        """Exclude stages on devices, whatever they recompute, to go on to the next best."""
        layers, held = self.decisions.places(stages)
        differences: list[Literal] = self.decisions.layers.differences(layers)
        for (j, d), literal in self.decisions.on.items():
            differences.append(~literal if (j, d) in held else literal)
        self.model.add_bool_or(differences)

    def hint(self, stages: Stages) -> None:
        """Suggest stages on devices, and what they recompute if they recompute anything."""
        self._clear_hints()
        for variable, value in self.decisions.values_of(stages):
            self.model.add_hint(variable, value)
        layers, _ = self.decisions.places(stages)
        again = {self.decisions.position(layer) for stage in stages for layer in stage.recompute}
        if again and self._recomputation is not None:
            for (j, layer), literal in self._recomputation.again.items():
                here = j < len(layers) and layer in layers[j]
                self.model.add_hint(literal, here and layer in again)

    def complete_hint(self, solver: cp_model.CpSolver, clock: Clock) -> bool:
        """Solve with the hinted decisions fixed and hint all variables of what comes out.

        CP-SAT often drops a hint that leaves auxiliary variables open.
        """
        status = self.solve_hinted(solver, clock)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._clear_hints()
            return False
        values = list(solver.response_proto.solution)
        self._clear_hints()
        for index, value in enumerate(values):
            self.model.add_hint(self.model.get_int_var_from_proto_index(index), value)
        return True

    def solve_hinted(self, solver: cp_model.CpSolver, clock: Clock) -> cp_model.CpSolverStatus:
        """Solve with the hinted decisions fixed."""
        solver.parameters.fix_variables_to_their_hinted_value = True
        return run_solver(solver, self.model, clock)

    def _clear_hints(self) -> None:
        self.model.clear_hints()  # type: ignore[no-untyped-call]

    # --- solutions ---------------------------------------------------------------------------

    def stages(self, values: Values) -> tuple[StageSpec, ...]:
        """The stages of a solution, with what they recompute."""
        names = self.decisions.chain.names
        return tuple(
            StageSpec(
                tuple(names[layer] for layer in layers),
                self._devices(values, j),
                tuple(names[layer] for layer in layers if self._recomputes(values, j, layer)),
            )
            for j, layers in enumerate(self.decisions.layers.chosen(values))
            if layers
        )

    def partition(self, values: Values) -> Partition:
        """The partition of a solution of the chain form, nothing recomputed."""
        return tuple(replace(stage, recompute=()) for stage in self.recomputed(values))

    def recomputed(self, values: Values) -> Partition:
        """The partition of a solution of the chain form, with what its stages recompute."""
        return tuple(
            StageChoice(
                layers[0],
                layers[-1] + 1,
                self._devices(values, j),
                tuple(layer for layer in layers if self._recomputes(values, j, layer)),
            )
            for j, layers in enumerate(self.decisions.layers.chosen(values))
            if layers
        )

    def _devices(self, values: Values, j: int) -> tuple[str, ...]:
        devices, on = self.decisions.devices, self.decisions.on
        return tuple(x for d, x in enumerate(devices) if values.boolean_value(on[j, d]))

    def _recomputes(self, values: Values, j: int, layer: int) -> bool:
        again = self._recomputation.again if self._recomputation is not None else {}
        return (j, layer) in again and values.boolean_value(again[j, layer])
