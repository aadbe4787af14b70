"""Stages, device sets, replica counts and recomputation as one CP-SAT model.

The objective is planner.search.partition.bounds.schedule.schedule_bound_s, which holds for every
schedule, so the model's own bound holds for every plan with at most one stage a device. All
durations are rounded down and all relaxations lean the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ortools.sat.python import cp_model

from planner.costs.placed_pipeline import StageSpec
from planner.search.budget import Clock, run_solver
from planner.search.partition.chain import Chain, Partition, StageChoice
from planner.search.partition.cp_sat.decisions import FINE, OBJECTIVE_TICKS, Decisions, Stages
from planner.search.partition.cp_sat.endings import StageEndings
from planner.search.partition.cp_sat.memory import StageMemory, memory_may_bind
from planner.search.partition.cp_sat.recomputation import RecomputeDecisions
from planner.search.partition.cp_sat.stages import Expression, Literal, Values
from planner.search.partition.cp_sat.times import StageTimes, StageTransfers, TypeShare

PRICE_STEPS = 1000


class IterationBound:
    """The expression of planner.search.partition.bounds.schedule_bound_s.

    Where memory may bind also that of planner.search.partition.bounds.partition, with the tail
    after it.

    Attributes:
        value: the bound in ticks of the objective; the model's objective.
    """

    def __init__(
        self,
        decisions: Decisions,
        times: StageTimes,
        transfers: StageTransfers,
        endings: StageEndings,
        memory: StageMemory | None,
    ) -> None:
        self._d = decisions
        self._model = decisions.model
        self._times = times
        self._transfers = transfers
        self._endings = endings
        self.value = decisions.model.new_int_var(0, OBJECTIVE_TICKS + 1, "iteration time")
        self._fine = FINE * self.value + FINE - 1
        self._round_trip = self._round_trips()
        self._tail = self._stage_tails()
        self._head = self._heads()
        for j in decisions.stages:
            self._take(self._head[j] + times.load[j] + self._tail[j], [decisions.active[j]])
            self._bound_returns(j, times.shares[j], self._tail[j])
            if times.work is not times.load:
                own = times.work[j] + endings.ending[j]
                self._take(self._head[j] + own, [decisions.active[j]])
                self._bound_returns(j, times.work_shares[j], endings.ending[j])
            if j + 1 < len(decisions.stages):
                self._bound_channel(j)
            if memory is not None:
                self._bound_in_flight(j, memory)
        self._spread_work()

    def _take(self, time: Expression, literals: Sequence[Literal]) -> None:
        """Require that the iteration takes a time at least, under some literals."""
        self._model.add(self._fine >= time).only_enforce_if(literals)

    def _heads(self) -> list[Expression]:
        """From the iteration's start to the first microbatch's arrival at each stage."""
        heads: list[Expression] = [0]
        for j in self._d.stages[1:]:
            head = self._d.time(f"head {j}")
            before = heads[-1] + self._times.least_forward[j - 1] + self._transfers.send[j - 1]
            self._model.add(head == before).only_enforce_if(self._d.active[j])
            heads.append(head)
        return heads

    def _round_trips(self) -> list[Expression]:
        """From a stage's forward through all later stages and back to its own backward."""
        count = len(self._d.stages)
        trips: list[Expression] = [0] * (count + 1)
        for j in reversed(self._d.stages):
            trips[j] = self._d.time(f"round trip {j}")
            there = self._times.least_forward[j] + self._times.least_gradient[j]
            self._model.add(trips[j] >= there).only_enforce_if(self._d.active[j])
            if j + 1 < count:
                further = there + self._transfers.send[j] + self._transfers.back[j] + trips[j + 1]
                self._model.add(trips[j] >= further).only_enforce_if(self._d.active[j + 1])
        return trips

    def _stage_tails(self) -> list[Expression]:
        """From a stage's last gradient to the end of the iteration."""
        tails: list[Expression] = []
        for j in self._d.stages:
            value = self._d.time(f"tail {j}")
            own = self._times.least_weight[j] + self._endings.ending[j]
            self._model.add(value >= own).only_enforce_if(self._d.active[j])
            if j:
                way = self._transfers.back[j - 1] + self._times.least_gradient[j - 1] + tails[-1]
                self._model.add(value >= way).only_enforce_if(self._d.active[j])
            tails.append(value)
        return tails

    def _bound_returns(self, j: int, shares: Sequence[TypeShare], after: Expression) -> None:
        """All backwards follow the first return, and the last return follows all forwards."""
        begin = self._head[j]
        if j + 1 < len(self._d.stages):
            # Nothing of this is there after the last stage.
            begin += self._transfers.send[j] + self._round_trip[j + 1] + self._transfers.back[j]
        for share in shares:
            self._take(begin + share.forward + share.backwards + after, [share.runs])
            self._take(begin + share.forwards + share.backward + after, [share.runs])

    def _bound_channel(self, j: int) -> None:
        """Between two single devices all microbatches pass one after the other."""
        replicated = [*self._d.is_replicated(j), *self._d.is_replicated(j + 1)]
        condition: list[Literal] = [self._d.active[j + 1]]
        condition += [~literal for literal in replicated]
        condition += self._transfers.exclusive(j)
        count = self._d.job.microbatches
        send, back = self._transfers.send[j], self._transfers.back[j]
        begin = self._head[j] + self._times.least_forward[j]
        end = self._times.least_gradient[j] + self._tail[j]
        trip = self._round_trip[j + 1]
        self._take(begin + count * send + trip + back + end, condition)
        self._take(begin + send + trip + count * back + end, condition)

    def _bound_in_flight(self, j: int, memory: StageMemory) -> None:
        """Each block of microbatches in flight takes a round trip; the last also its own work."""
        head, trip, tail = self._head[j], self._round_trip[j], self._tail[j]
        single = [~literal for literal in self._d.is_replicated(j)]
        for i, level in enumerate(memory.levels):
            chosen = memory.in_flight[j, i]
            before = head + level.blocks * trip
            if level.blocks:
                self._take(before + trip + tail, [chosen])
            for k in range(len(self._d.chain.types) if level.blocks else 0):
                work = level.rest * (self._times.forward[k][j] + self._times.gradient[k][j])
                used = self._times.uses_type[j, k]
                self._take(before + work + tail, [chosen, used, *single])

    def _spread_work(self) -> None:
        """Redundant: the devices' time between head and tail must hold all layers' work.

        Where backwards may be split, weight gradients run while the last gradient goes its way:
        only the stage's own ending follows all of the work.

        Work is priced by the dual values of the even-load relaxation; without this constraint
        CP-SAT sees no connection between the stages' loads.
        """
        chain = self._d.chain
        dual = chain.load_prices
        prices = [round(PRICE_STEPS * float(x)) for x in dual / dual.max()]
        ticks = [self._d.ticks(row) for row in chain.work_s]
        work = sum(
            min(price * times[layer] for price, times in zip(prices, ticks, strict=True))
            for layer in range(chain.length)
        )
        after = self._endings.ending if chain.splits else self._tail
        time = []
        for d, kind in enumerate(chain.kinds):
            free = self._d.time(f"time of {self._d.devices[d]}")
            holds = [self._d.on[j, d] for j in self._d.stages]
            self._model.add(free <= self._fine)
            self._model.add(free == 0).only_enforce_if([~literal for literal in holds])
            for j, literal in enumerate(holds):
                limit = self._fine - self._head[j] - after[j]
                self._model.add(free <= limit).only_enforce_if(literal)
            time.append(prices[kind] * free)
        self._model.add(sum(time) >= self._d.job.microbatches * work)


class PartitionModel:
    """The partition model; ``model`` and ``decisions`` are public, to add constraints to.

    Args:
        chain: the layers.
        horizon_s: time of a known plan; nothing slower is looked for.
        max_stages: the largest number of stages.
        least_s: a proven bound on every plan; the objective is not below it.
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
        break_symmetry: bool = True,
    ) -> None:
        # Variables: stages, their layers and devices, and the layers that run again.
        self.decisions = Decisions(chain, horizon_s, max_stages, break_symmetry=break_symmetry)
        binds = memory_may_bind(chain, horizon_s)
        self._recomputation = RecomputeDecisions(self.decisions) if binds else None
        # Constraints: what stages compute, send and end with, and whether they fit.
        self.times = StageTimes(self.decisions, self._recomputation)
        self.transfers = StageTransfers(self.decisions)
        self.endings = StageEndings(self.decisions, self.times)
        self.memory: StageMemory | None = None
        if self._recomputation is not None:
            self.memory = StageMemory(self.decisions, self.times, self._recomputation)
        # Objective: no schedule of the stages takes less time.
        self.objective = IterationBound(
            self.decisions, self.times, self.transfers, self.endings, self.memory
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
        """Return the stages of a solution, with what they recompute."""
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
        """Return the partition of a solution, nothing recomputed."""
        return tuple(replace(stage, recompute=()) for stage in self.recomputed(values))

    def recomputed(self, values: Values) -> Partition:
        """Return the partition of a solution, with what its stages recompute."""
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
