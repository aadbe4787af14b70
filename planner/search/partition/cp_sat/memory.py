"""Memory of the stages: what they hold, with how many microbatches in flight.

How many microbatches are in flight at each stage: few enough for memory, many for speed.

The bound of planner.search.partition.bounds.partition as decisions: with at most k in flight,
blocks of k microbatches take a round trip each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from planner.costs.optimizer import most_holders, static_bytes
from planner.search.partition.chain import Chain, FloatArray
from planner.search.partition.cp_sat.decisions import Decisions
from planner.search.partition.cp_sat.recomputation import RecomputeDecisions, StageStashes
from planner.search.partition.cp_sat.stages import Expression
from planner.search.partition.cp_sat.tensors import ByteUnit
from planner.search.partition.cp_sat.times import StageTimes
from planner.search.partition.intervals import interval_sums
from planner.search.partition.memory.interval_memory import IntervalMemory

MOST_SINGLE = 16
"""Up to here every number in flight is told apart."""
GROWTH = 1.2
"""Beyond, numbers within this factor are taken together."""


@dataclass(frozen=True)
class Level:
    """Microbatches in flight, ``least`` to ``most``: memory of the least, speed of the most.

    Attributes:
        least, most: microbatches in flight.
        blocks: full blocks before the last one.
        rest: microbatches of the last block.
    """

    least: int
    most: int
    blocks: int
    rest: int


def in_flight_levels(microbatches: int) -> tuple[Level, ...]:
    """Return levels that together are every number from 1 to all microbatches."""
    levels: list[Level] = []
    least = 1
    while least <= microbatches:
        most = least
        if least > MOST_SINGLE:
            blocks = -(-microbatches // least)
            alike = microbatches if blocks == 1 else (microbatches - 1) // (blocks - 1)
            most = min(microbatches, max(alike, int(GROWTH * least)))
        blocks = -(-microbatches // most) - 1
        levels.append(Level(least, most, blocks, microbatches - blocks * most))
        least = most + 1
    return tuple(levels)


MOST_UNITS = 2**30
MOST_LAYERS = 1500
"""Longer chains are not looked at interval by interval."""


def memory_may_bind(chain: Chain, horizon_s: float) -> bool:
    """Return whether a stage of a plan within the horizon could be short of memory.

    A stage of work w a microbatch has no use for more in flight than the longest round trip holds
    of it. If that many always fit, nothing recomputed, memory decides nothing.
    """
    kinds = chain.problem.cluster.device_types
    capacity = min(kinds[name].capacity_bytes for name in chain.types)
    if chain.length > MOST_LAYERS:
        return _whole_bytes(chain) > capacity
    memory, count = IntervalMemory(chain), chain.problem.job.microbatches
    work = np.min([_work_s(row) for row in chain.work_s], axis=0)
    replicas = len(chain.problem.cluster.devices) if chain.problem.job.replication else 1
    stages = np.triu(np.ones_like(work, dtype=bool), 1) & (count * work <= horizon_s * replicas)
    with np.errstate(divide="ignore", invalid="ignore"):
        useful = np.where(work > 0, np.ceil(_round_trip_s(chain, horizon_s) / work) + 1, count)
    need = memory.held_bytes + np.minimum(useful, count) * memory.stash_bytes
    return bool((need[stages] > capacity).any())


def _work_s(layers_s: FloatArray) -> FloatArray:
    """Return ``[i, j]``: a microbatch forward and back through layers i to j."""
    return np.asarray(np.maximum(interval_sums(layers_s), 0.0))


def _round_trip_s(chain: Chain, horizon_s: float) -> FloatArray:
    """Return ``[i, 0]``: from a forward at layer i to its backward, at most."""
    cluster = chain.problem.cluster
    slowest = np.max([_work_s(row)[:, -1] for row in chain.work_s], axis=0)
    table = cluster.link_table
    joined = np.isfinite(table.s_per_byte)
    most = chain.max_stages - 1
    latency_s = float(table.latency_s[joined].max())
    bytes_ = np.maximum(chain.cut_bytes, chain.cut_gradient_bytes).max()
    transfer_s = latency_s + float(bytes_ * table.s_per_byte[joined].max())
    way = slowest + 2 * most * transfer_s
    return np.asarray(np.minimum(way, horizon_s))[:, None]


def _whole_bytes(chain: Chain) -> int:
    """Return everything at once on one device."""
    record = chain.problem.graph.record
    tensors = [tensor.bytes for tensor in record.boundaries]
    stash = sum(layer.stash_bytes for layer in record.layers) + sum(tensors)
    state = static_bytes(chain.problem, record.parameters)
    return state + chain.problem.job.microbatches * stash + int(chain.peak_bytes.max())


class StageMemory:
    """Memory constraints, and the microbatches in flight that they allow.

    Attributes:
        levels: numbers of microbatches in flight that are told apart.
        in_flight: ``in_flight[j, i]``: level i is all that stage j has in flight, over all its
            replicas; exactly one for a stage that exists.
        stash: of a microbatch, by stage, in units.
    """

    def __init__(
        self, decisions: Decisions, times: StageTimes, recomputation: RecomputeDecisions
    ) -> None:
        self._d = decisions
        self._model = decisions.model
        self._uses_type = times.uses_type
        record = decisions.chain.problem.graph.record
        stash_bytes = sum(layer.stash_bytes for layer in record.layers)
        state_bytes = static_bytes(decisions.chain.problem, record.parameters)
        self._sizes = [tensor.bytes for tensor in decisions.tensors]
        peaks = decisions.chain.peak_bytes
        total = state_bytes + stash_bytes + sum(self._sizes) + int(peaks.max())
        self._unit = ByteUnit.for_total(total, MOST_UNITS)
        self.stash = StageStashes(decisions, recomputation, self._unit).stash
        self._again = recomputation.again
        self.levels = in_flight_levels(decisions.job.microbatches)
        self.in_flight: dict[tuple[int, int], cp_model.IntVar] = {}
        held = self._held()
        for j in decisions.stages:
            self._choose_level(j)
            if decisions.job.replication:
                self._fit_replicas(j, *held[j])
            else:
                self._fit_single(j, *held[j])

    def _choose_level(self, j: int) -> None:
        found = [self._model.new_bool_var(f"{x.least} in flight at {j}") for x in self.levels]
        self._model.add(sum(found) == self._d.active[j])
        self.in_flight.update({(j, i): literal for i, literal in enumerate(found)})

    def _fit_single(self, j: int, standing: Expression, moved: Expression) -> None:
        limits = [(x.least, self.in_flight[j, i]) for i, x in self._numbered]
        for k in range(len(self._d.chain.types)):
            self._fit(j, k, standing + moved, limits)

    @property
    def _numbered(self) -> list[tuple[int, Level]]:
        return list(enumerate(self.levels))

    def _fit_replicas(self, j: int, standing: Expression, moved: Expression) -> None:
        """Replicas of one type have equally many in flight; together they have the stage's.

        Some may have none at all.
        """
        count = self._d.job.microbatches
        together = []
        for k in range(len(self._d.chain.types)):
            members = self._d.holders(j, k)
            each = [self._model.new_bool_var("") for _ in (None, *self.levels)]
            self._model.add_exactly_one(each)
            most = self._model.new_int_var(0, count, "")
            self._model.add(most == sum(x.most * each[i + 1] for i, x in self._numbered))
            self._fit(j, k, standing, [(0, each[0])])
            limits = [(x.least, each[i + 1]) for i, x in self._numbered]
            self._fit(j, k, standing + moved, limits)
            replicas = self._model.new_int_var(0, len(members), "")
            self._model.add(replicas == sum(members))
            product = self._model.new_int_var(0, count * len(members), "")
            self._model.add_multiplication_equality(product, [replicas, most])
            together.append(product)
        for i, level in self._numbered:
            self._model.add(sum(together) >= level.least).only_enforce_if(self.in_flight[j, i])

    def _fit(
        self,
        j: int,
        k: int,
        held: Expression,
        limits: Sequence[tuple[int, cp_model.IntVar]],
    ) -> None:
        """So many microbatches in flight under each literal fit a device of the type."""
        kind = self._d.cluster.device_types[self._d.chain.types[k]]
        capacity = -(-kind.capacity_bytes // self._unit.bytes)
        for count, literal in limits:
            fits = self._model.add(held + count * self.stash[j] <= capacity)
            fits.only_enforce_if([literal, self._uses_type[j, k]])

    # --- besides the stashes -----------------------------------------------------------------

    def _held(self) -> list[tuple[Expression, Expression]]:
        """Return what is held besides the stashes when most is held, whatever the schedule.

        Weights, gradients, optimizer state and workspace at all times; with any microbatch the
        output being made or, in a whole backward, the gradients received and being made.
        """
        state = self._d.sums(self._unit.floor([int(x) for x in self._d.chain.static_bytes]))
        gradients = [tensor.gradient_bytes for tensor in self._d.tensors]
        sent, returned = self._crossing(self._sizes), self._crossing(gradients)
        most = max(1, 2 * sum(self._sizes) // self._unit.bytes)
        held: list[tuple[Expression, Expression]] = []
        for j in self._d.stages:
            moved = self._model.new_int_var(0, most, "")
            self._model.add(moved >= sent[j + 1])
            if not self._d.chain.splits:
                self._model.add(moved >= returned[j] + returned[j + 1])
            held.append((state[j] + self._tied(j) + self._workspace(j), moved))
        return held

    def _crossing(self, sizes: list[int]) -> list[Expression]:
        units = self._unit.floor(sizes)
        return [
            self._d.layers.crossing(units, j) if any(units) else 0
            for j in range(len(self._d.stages) + 1)
        ]

    def _tied(self, j: int) -> Expression:
        """Tied parameters in a stage that has some of their layers, but not the first."""
        problem = self._d.chain.problem
        holders: dict[str, list[int]] = {}
        for position, layer in enumerate(problem.graph.record.layers):
            for name in layer.parameters:
                holders.setdefault(name, []).append(position)
        state: Expression = 0
        for name, (first, *others) in holders.items():
            if others:
                row = problem.graph.parameters[name]
                size = static_bytes(problem, [row], most_holders(problem))
                again = [self._d.holds_any(j, others), ~self._d.holds(j, first)]
                state += size // self._unit.bytes * self._d.all_of(again)
        return state

    def _workspace(self, j: int) -> Expression:
        """Return what is held besides whole stashes while a layer runs (costs.stage_bytes)."""
        graph = self._d.chain.problem.graph
        peaks = self._unit.floor([int(x) for x in self._d.chain.peak_bytes])
        inputs = graph.saved_input_bytes
        most: Expression = 0
        for number, layer in enumerate(graph.record.layers):
            here, again = self._d.holds(j, number), self._again.get((j, number), 0)
            saving = max(0, layer.stash_bytes - inputs[layer.name]) // self._unit.bytes
            kept = -(-layer.stash_bytes // self._unit.bytes) * here - saving * again
            held = self._model.new_int_var(0, max(peaks), "")
            self._model.add(held >= most - kept)
            self._model.add(held >= peaks[number] * here - kept)
            most = held
        return most
