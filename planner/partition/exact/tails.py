"""Memory, and what follows a stage's last backward: reduction of gradients and optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

from ortools.sat.python import cp_model

from planner.costs.collectives import fewest_steps, inverse_bandwidth, latency_s
from planner.partition.exact.decisions import Decisions, Expression
from planner.partition.exact.times import StageTimes

KIB = 1024
SCALE = 2**20
"""Fixed-point denominator of ticks a KiB."""
LARGEST = 2**60
"""CP-SAT refuses sums that could leave 64 bits; this is far beyond every horizon."""


class StageTails:
    """Ends of the stages.

    Attributes:
        tail: per stage, all-reduces and optimizer step after its last backward, in ticks.
    """

    def __init__(self, decisions: Decisions, times: StageTimes) -> None:
        self._d = decisions
        self._model = decisions.model
        self._times = times
        self._fit_memory()
        stages = decisions.stages
        self._tied_inside: list[Expression] = [0 for _ in stages]
        self._tied_apart: list[Expression] = [0 for _ in stages]
        for layers, bytes_ in decisions.chain.tied_parameters.items():
            self._reduce_tied(layers, bytes_ // KIB)
        reduce = self._reduce_replicas()
        step = self._optimizer_steps()
        self.tail = [reduce[j] + self._tied_apart[j] + step[j] for j in stages]

    def _fit_memory(self) -> None:
        """Weights, gradients, optimizer state and the stash of one microbatch at least.

        Where layers may be recomputed, only what their recomputation starts from is kept.
        """
        chain = self._d.chain
        received = [int(x) // KIB for x in chain.stashes.received_bytes]
        layers = chain.stashes.kept_bytes if self._d.job.recompute else chain.stash_bytes
        need = self._d.sums([int(x) // KIB for x in chain.static_bytes + layers])
        for j in self._d.stages:
            need[j] += self._d.at(received, j)
        for (j, k), used in self._times.uses_type.items():
            kind = self._d.cluster.device_types[chain.types[k]]
            self._model.add(need[j] <= -(-kind.capacity_bytes // KIB)).only_enforce_if(used)

    def _reduce_replicas(self) -> list[cp_model.IntVar]:
        gradients = self._d.sums([int(x) // KIB for x in self._d.chain.gradient_bytes])
        durations = [self._d.time(f"reduce {j}") for j in self._d.stages]
        if self._d.job.replication:
            for j in self._d.stages:
                counts = {n: x for (stage, n), x in self._d.at_least.items() if stage == j}
                kib = gradients[j] + self._tied_inside[j]
                self._reduce_among(self._d.holders(j), counts, kib, durations[j], steps=True)
        return durations

    def _reduce_among(
        self,
        members: Sequence[cp_model.IntVar],
        at_least: Mapping[int, cp_model.IntVar],
        kib: Expression,
        duration: cp_model.IntVar,
        *,
        steps: bool,
    ) -> None:
        """An all-reduce among the member devices takes at least this long.

        As planner.costs.collectives.fastest_all_reduce_s says: of each member by its widest path
        to a fellow member and by its quickest one.
        """
        if not at_least:
            return
        chain = self._d.chain
        most_kib = (int(chain.gradient_bytes.sum()) + sum(chain.tied_parameters.values())) // KIB
        some = self._model.new_bool_var("")
        self._model.add(kib == 0).only_enforce_if(~some)
        cluster, names = self._d.cluster, self._d.devices
        for d, member in enumerate(members):
            others = [v for v in range(len(members)) if v != d]
            inverse = {v: inverse_bandwidth(cluster, names[d], names[v]) for v in others}
            latency = {v: latency_s(cluster, names[d], names[v]) for v in others}
            reachable = [v for v in others if not math.isinf(inverse[v])]
            joined = [members[v] for v in reachable]
            self._model.add_bool_or([~some, ~member, ~at_least[2], *joined])
            inverses, latencies = ({x[v] for v in reachable} for x in (inverse, latency))
            for width, delay in product(sorted(inverses), sorted(latencies) if steps else [0.0]):
                better = [v for v in reachable if inverse[v] < width or latency[v] < delay]
                for count, literal in at_least.items():
                    per_kib = self._fixed_point(2 * (count - 1) / count * width * KIB, most_kib)
                    start = self._fixed_point(fewest_steps(count) * delay)
                    self._model.add(duration * SCALE >= per_kib * kib + start).only_enforce_if(
                        [some, member, literal, *(~members[v] for v in better)]
                    )

    def _fixed_point(self, seconds: float, times: int = 1) -> int:
        """Ticks in fixed point, rounded down; cut off where ``times`` as much would overflow."""
        return min(math.floor(seconds / self._d.tick_s * SCALE), LARGEST // max(times, 1))

    def _reduce_tied(self, layers: tuple[int, ...], kib: int) -> None:
        """A tied parameter is reduced among all stages that have one of its layers."""
        stages = self._d.stages
        holds = [self._holds(j, layers) for j in stages]
        apart = self._model.new_bool_var(f"layers {layers} in several stages")
        self._model.add(sum(holds) >= 2).only_enforce_if(apart)
        self._model.add(sum(holds) <= 1).only_enforce_if(~apart)
        duration = self._d.time(f"reduce tied {layers}")
        # Parameters tied between the same stages are reduced in one go: no latency of its own.
        self._reduce_among(self._members(holds), {2: apart}, kib, duration, steps=False)
        for j in stages:
            own = self._d.time()
            self._model.add(own >= duration).only_enforce_if([holds[j], apart])
            self._tied_apart[j] += own
            inside = self._model.new_int_var(0, kib, "")
            self._model.add(inside == kib).only_enforce_if([holds[j], ~apart])
            self._tied_inside[j] += inside

    def _holds(self, j: int, layers: tuple[int, ...]) -> cp_model.IntVar:
        """Whether a stage has one of the layers."""
        inside = [
            self._d.all_of(
                [self._d.is_cut_at_most(j, layer), ~self._d.is_cut_at_most(j + 1, layer)]
            )
            for layer in layers
        ]
        holds = self._model.new_bool_var(f"stage {j} has one of layers {layers}")
        self._model.add_max_equality(holds, inside)
        return holds

    def _members(self, holds: Sequence[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """Whether each device holds one of the stages in question."""
        members = []
        for d in range(len(self._d.devices)):
            member = self._model.new_bool_var("")
            both = [self._d.all_of([self._d.on[j, d], holds[j]]) for j in self._d.stages]
            self._model.add_max_equality(member, both)
            members.append(member)
        return members

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
