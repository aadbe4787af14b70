"""What follows a stage's last backward: reduction of gradients and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model

from planner.partition.exact.decisions import Decisions
from planner.partition.exact.device_sets import REPLICA_STEPS
from planner.partition.exact.layer_stages import Expression, Literal
from planner.partition.exact.reductions import Reductions
from planner.partition.exact.times import StageTimes


class StageTails:
    """Ends of the stages.

    Attributes:
        tail: per stage, all-reduces and optimizer step after its last backward, in ticks.
    """

    def __init__(self, decisions: Decisions, times: StageTimes) -> None:
        self._d = decisions
        self._model = decisions.model
        self._times = times
        self._reductions = Reductions(decisions)
        stages = decisions.stages
        self._tied_inside: list[Expression] = [0 for _ in stages]
        self._tied_apart: list[Expression] = [0 for _ in stages]
        for layers, bytes_ in decisions.chain.tied_parameters.items():
            self._reduce_tied(layers, bytes_ // self._reductions.unit.bytes)
        reduce = self._reduce_replicas()
        step = self._optimizer_steps()
        self.tail = [reduce[j] + self._tied_apart[j] + step[j] for j in stages]

    def _reduce_replicas(self) -> list[cp_model.IntVar]:
        units = self._reductions.unit.floor([int(x) for x in self._d.chain.gradient_bytes])
        gradients = self._d.sums(units)
        durations = [self._d.time(f"reduce {j}") for j in self._d.stages]
        if self._d.job.replication:
            for j in self._d.stages:
                counts = {n: x for (stage, n), x in self._d.at_least.items() if stage == j}
                reduced = gradients[j] + self._tied_inside[j]
                members = self._d.holders(j)
                self._reductions.among(members, counts, reduced, durations[j], latency=True)
        return durations

    def _reduce_tied(self, layers: tuple[int, ...], units: int) -> None:
        """A tied parameter is reduced among all stages that have one of its layers."""
        stages = self._d.stages
        holds = [self._d.holds_any(j, layers) for j in stages]
        apart = self._model.new_bool_var(f"layers {layers} in several stages")
        self._model.add(sum(holds) >= 2).only_enforce_if(apart)
        self._model.add(sum(holds) <= 1).only_enforce_if(~apart)
        duration = self._d.time(f"reduce tied {layers}")
        members = self._members(holds)
        # Parameters tied between the same stages are reduced in one go: no latency of its own.
        alone = len(self._d.chain.tied_parameters) == 1
        counts = {2: apart, **self._counts(members, apart)}
        self._reductions.among(members, counts, units, duration, latency=alone)
        for j in stages:
            own = self._d.time()
            self._model.add(own >= duration).only_enforce_if([holds[j], apart])
            self._tied_apart[j] += own
            inside = self._model.new_int_var(0, units, "")
            self._model.add(inside == units).only_enforce_if([holds[j], ~apart])
            self._tied_inside[j] += inside

    def _counts(
        self, members: Sequence[cp_model.IntVar], apart: cp_model.IntVar
    ) -> dict[int, cp_model.IntVar]:
        """Literals of three members or more in several stages."""
        found = {}
        for count in (step for step in REPLICA_STEPS if 2 < step <= len(members)):
            literal = self._model.new_bool_var("")
            self._model.add(sum(members) <= count - 1).only_enforce_if([~literal, apart])
            self._model.add_implication(literal, apart)
            found[count] = literal
        return found

    def _members(self, holds: Sequence[Literal]) -> list[cp_model.IntVar]:
        """Whether each device holds one of the stages in question."""
        return [
            self._d.any_of([self._d.all_of([self._d.on[j, d], holds[j]]) for j in self._d.stages])
            for d in range(len(self._d.devices))
        ]

    def _optimizer_steps(self) -> list[cp_model.IntVar]:
        """On the type with the widest memory among those a stage uses."""
        types = self._d.chain.types
        widths = [self._d.cluster.device_types[t].memory_bandwidth_gb_per_s for t in types]
        moved = self._d.chain.optimizer_traffic_bytes
        steps = [self._d.time(f"optimizer {j}") for j in self._d.stages]
        for k, width in enumerate(widths):
            sums = self._d.sums(self._d.ticks(moved / (width * 1e9)))
            for j in self._d.stages:
                uses = self._times.uses_type
                wider = [~uses[j, other] for other, w in enumerate(widths) if w > width]
                self._model.add(steps[j] >= sums[j]).only_enforce_if([uses[j, k], *wider])
        return steps
