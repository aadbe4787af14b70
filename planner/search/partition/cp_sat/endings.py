"""What follows a stage's last backward: reduction of gradients and optimizer step.

All-reduces of gradients among the devices of a stage, or of stages that share parameters.

As planner.costs.collectives.fastest_all_reduce_s says: each device exchanges its share over its
widest path to a fellow at best, in steps that take its least latency at best; and all of them
together use some link as narrow as the worst of the widest spanning tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ortools.sat.python import cp_model

from planner.cluster.link_table import Join
from planner.costs.collectives import fewest_steps, inverse_bandwidth, latency_s
from planner.search.partition.cp_sat.decisions import REPLICA_STEPS, Decisions
from planner.search.partition.cp_sat.stages import Expression, Literal
from planner.search.partition.cp_sat.tensors import SCALE, ByteUnit, fixed_point
from planner.search.partition.cp_sat.times import StageTimes

MOST_STEPS = 1024
"""Far beyond the steps of a tree among all devices that the model can have."""
MOST_JOINS = 8
"""Steps of the widest spanning tree that are looked at: those where the bandwidth drops most."""


class Reductions:
    """Lower bounds on all-reduces.

    Attributes:
        unit: of the gradients' bytes.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._d = decisions
        self._model = decisions.model
        chain = decisions.chain
        most = int(chain.gradient_bytes.sum()) + sum(chain.tied_parameters.values())
        self.unit = ByteUnit.for_total(most)
        self._most_units = most // self.unit.bytes
        self._joins = _steepest(decisions.cluster.link_table.joins)

    def among(
        self,
        members: Sequence[cp_model.IntVar],
        at_least: Mapping[int, cp_model.IntVar],
        units: Expression,
        duration: cp_model.IntVar,
        *,
        latency: bool,
    ) -> None:
        """Require that an all-reduce among the member devices takes at least this long.

        Args:
            members: by device.
            at_least: that there are so many members or more; nothing is reduced if it is empty.
            units: to be reduced.
            duration: in ticks.
            latency: whether the steps' latency is counted.
        """
        if not at_least:
            return
        some = self._model.new_bool_var("")
        self._model.add(units == 0).only_enforce_if(~some)
        moved = self._moved(units, at_least)
        steps = self._steps(some, at_least) if latency else 0
        for d, member in enumerate(members):
            for s_per_byte, delay_s, better in self._paths(d, latency=latency):
                time = self._scaled(s_per_byte, delay_s, moved, steps)
                self._model.add(duration * SCALE + SCALE - 1 >= time).only_enforce_if(
                    [member, *(~members[v] for v in better)]
                )
            reachable = [members[v] for v in self._reachable(d)]
            self._model.add_bool_or([~some, ~member, ~at_least[2], *reachable])
        for join in self._joins:
            least_s = self._d.cluster.link_table.least_latency_s
            time = self._scaled(join.s_per_byte, least_s, moved, steps)
            sides = [
                self._d.any_of([members[d] for d in side]) for side in (join.first, join.second)
            ]
            self._model.add(duration * SCALE + SCALE - 1 >= time).only_enforce_if(sides)

    def _moved(self, units: Expression, at_least: Mapping[int, cp_model.IntVar]) -> Expression:
        """Each of n devices exchanges 2(n-1)/n of the units."""
        moved = self._model.new_int_var(0, 2 * self._most_units + 1, "")
        for count, literal in at_least.items():
            self._model.add(count * moved + count - 1 >= 2 * (count - 1) * units).only_enforce_if(
                literal
            )
        return moved

    def _steps(
        self, some: cp_model.IntVar, at_least: Mapping[int, cp_model.IntVar]
    ) -> cp_model.IntVar:
        """Steps one after another, if there is anything to reduce."""
        steps = self._model.new_int_var(0, max(map(fewest_steps, at_least)), "")
        for count, literal in at_least.items():
            self._model.add(steps >= fewest_steps(count)).only_enforce_if([some, literal])
        return steps

    def _scaled(
        self, s_per_byte: float, delay_s: float, moved: Expression, steps: Expression
    ) -> Expression:
        """Return the seconds of steps that all take this path, in fixed point."""
        each = fixed_point(s_per_byte * self.unit.bytes / self._d.tick_s, 2 * self._most_units + 1)
        return each * moved + fixed_point(delay_s / self._d.tick_s, MOST_STEPS) * steps

    def _reachable(self, d: int) -> list[int]:
        names = self._d.devices
        return [
            v
            for v in range(len(names))
            if v != d and not math.isinf(inverse_bandwidth(self._d.cluster, names[d], names[v]))
        ]

    def _paths(self, d: int, *, latency: bool) -> Iterator[tuple[float, float, list[int]]]:
        """Seconds a byte and latency that a device has at best without these better fellows."""
        cluster, names = self._d.cluster, self._d.devices
        reachable = self._reachable(d)
        inverse = {v: inverse_bandwidth(cluster, names[d], names[v]) for v in reachable}
        delay = {v: latency_s(cluster, names[d], names[v]) * latency for v in reachable}
        for width in sorted(set(inverse.values())):
            for start in sorted(set(delay.values())):
                left = [v for v in reachable if inverse[v] >= width and delay[v] >= start]
                if (
                    left
                    and min(inverse[v] for v in left) == width
                    and min(delay[v] for v in left) == start
                ):
                    yield width, start, [v for v in reachable if v not in left]


def _steepest(joins: Sequence[Join]) -> list[Join]:
    """Return the joins at which the bandwidth drops most.

    A join with a single device is left out: it is that device's widest path.
    """
    steep = []
    for before, join in zip([None, *joins], joins, strict=False):
        if len(join.first) > 1 and len(join.second) > 1:
            drop = join.s_per_byte / before.s_per_byte if before else math.inf
            steep.append((drop, join))
    steep.sort(key=lambda row: -row[0])
    return [join for _, join in steep[:MOST_JOINS]]


class StageEndings:
    """What follows the last backward of each stage.

    Attributes:
        ending: per stage, all-reduces and optimizer step after its last backward, in ticks.
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
        if decisions.job.overlap_reduction:
            reduce = [self._exposed(j, reduce[j]) for j in stages]
        step = self._optimizer_steps()
        self.ending = [reduce[j] + self._tied_apart[j] + step[j] for j in stages]

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

    def _exposed(self, j: int, reduction: cp_model.IntVar) -> cp_model.IntVar:
        """What of a stage's all-reduce cannot be over when its last backward ends.

        It begins when that backward has run the last layer, at the earliest; see
        :func:`planner.search.partition.intervals.exposed_s`.
        """
        exposed = self._d.time(f"exposed reduction {j}")
        table = [[reduction - row[i] for i in self._d.stages] for row in self._times.last_backward]
        self._model.add(exposed >= self._times.least(table, j)).only_enforce_if(self._d.active[j])
        return exposed

    def _reduce_tied(self, layers: tuple[int, ...], units: int) -> None:
        """A tied parameter is reduced among all stages that have one of its layers.

        If that is in turn, among the replicas of each of these stages; what follows among them is
        left out, and all of it if they might have different numbers of replicas.
        """
        stages = self._d.stages
        holds = [self._d.holds_any(j, layers) for j in stages]
        if self._d.chain.reduces_tied_in_turn:
            for j in stages if self._d.job.has_pipelines else ():
                inside = self._model.new_int_var(0, units, "")
                self._model.add(inside == units).only_enforce_if(holds[j])
                self._tied_inside[j] += inside
            return
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
        """Return literals of three members or more in several stages."""
        found = {}
        for count in (step for step in REPLICA_STEPS if 2 < step <= len(members)):
            literal = self._model.new_bool_var("")
            self._model.add(sum(members) <= count - 1).only_enforce_if([~literal, apart])
            self._model.add_implication(literal, apart)
            found[count] = literal
        return found

    def _members(self, holds: Sequence[Literal]) -> list[cp_model.IntVar]:
        """Return whether each device holds one of the stages in question."""
        return [
            self._d.any_of([self._d.all_of([self._d.on[j, d], holds[j]]) for j in self._d.stages])
            for d in range(len(self._d.devices))
        ]

    def _optimizer_steps(self) -> list[cp_model.IntVar]:
        """Return each stage's optimizer step, on the type it uses that has the widest memory."""
        types = self._d.chain.types
        widths = [self._d.cluster.device_types[t].optimizer_gb_per_s for t in types]
        moved = self._d.chain.optimizer_traffic_bytes
        steps = [self._d.time(f"optimizer {j}") for j in self._d.stages]
        for k, width in enumerate(widths):
            sums = self._d.sums(self._d.ticks(moved / (width * 1e9)))
            for j in self._d.stages:
                uses = self._times.uses_type
                wider = [~uses[j, other] for other, w in enumerate(widths) if w > width]
                self._model.add(steps[j] >= sums[j]).only_enforce_if([uses[j, k], *wider])
        return steps
