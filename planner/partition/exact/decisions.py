"""What the model decides: boundaries, stages, and which devices hold them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.partition.chain import Chain, FloatArray
from planner.partition.symmetry import interchangeable_devices

Expression = Any
"""A linear expression; ortools types sums as unions that cannot be added again."""
TICKS = 20_000_000
"""Ticks in the longest time the model has to tell apart."""
REPLICA_STEPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Replica counts at which the all-reduce bound is sharpened; in between it is weaker but valid."""


class Decisions:
    """The decision variables, and lookups by boundary position.

    Attributes:
        model: the CP-SAT model.
        boundary: ``boundary[j]`` is the first layer of stage j; the last is the chain's end.
        active: whether stage j exists; existing stages come first.
        on: ``on[j, d]``: device number d (in cluster order) holds stage j.
        at_least: ``at_least[j, n]``: stage j has n replicas or more, for n of REPLICA_STEPS;
            empty if replication is not allowed.
        tick_s: seconds of a tick.
    """

    def __init__(self, chain: Chain, horizon_s: float, max_stages: int) -> None:
        self.chain = chain
        self.job = chain.problem.job
        self.cluster = chain.problem.cluster
        self.devices = self.cluster.device_names
        self.type_of = [chain.types.index(self.cluster.type_of(d)) for d in self.devices]
        self.stages = range(max_stages)
        self.tick_s = horizon_s / TICKS
        self.horizon = TICKS + 1
        self.model = cp_model.CpModel()
        self._comparisons: dict[tuple[int, int], cp_model.IntVar] = {}
        self._cut_chain()
        self._map_devices()
        self._count_replicas()
        self._break_symmetry()

    def _cut_chain(self) -> None:
        length, count = self.chain.length, len(self.stages)
        self.boundary = [
            self.model.new_int_var(0, length, f"boundary {j}") for j in range(count + 1)
        ]
        self.active = [self.model.new_bool_var(f"active {j}") for j in self.stages]
        self.model.add(self.boundary[0] == 0)
        self.model.add(self.boundary[count] == length)
        self.model.add(self.active[0] == 1)
        for j in self.stages:
            first, end, active = self.boundary[j], self.boundary[j + 1], self.active[j]
            self.model.add(end >= first + 1).only_enforce_if(active)
            self.model.add(first == length).only_enforce_if(~active)
            self.model.add(end == length).only_enforce_if(~active)
            if j:
                self.model.add_implication(active, self.active[j - 1])

    def _map_devices(self) -> None:
        numbers = range(len(self.devices))
        self.on = {
            (j, d): self.model.new_bool_var(f"stage {j} on {self.devices[d]}")
            for j in self.stages
            for d in numbers
        }
        for d in numbers:
            self.model.add_at_most_one(self.on[j, d] for j in self.stages)
        for j in self.stages:
            held = self.holders(j)
            self.model.add_bool_or([~self.active[j], *held])
            for literal in held:
                self.model.add_implication(literal, self.active[j])
            if not self.job.replication:
                self.model.add_at_most_one(held)

    def _count_replicas(self) -> None:
        self.at_least: dict[tuple[int, int], cp_model.IntVar] = {}
        if not self.job.replication:
            return
        for j in self.stages:
            replicas = sum(self.holders(j))
            for count in (step for step in REPLICA_STEPS if step <= len(self.devices)):
                literal = self.model.new_bool_var(f"stage {j} has {count} replicas or more")
                self.model.add(replicas >= count).only_enforce_if(literal)
                self.model.add(replicas <= count - 1).only_enforce_if(~literal)
                self.at_least[j, count] = literal

    def _break_symmetry(self) -> None:
        """Interchangeable devices hold stages in order, unused ones last."""
        count = len(self.stages)
        place = [
            sum(j * self.on[j, d] for j in self.stages)
            + count * (1 - sum(self.on[j, d] for j in self.stages))
            for d in range(len(self.devices))
        ]
        for group in interchangeable_devices(self.cluster):
            numbers = [self.devices.index(device) for device in group]
            for first, second in pairwise(numbers):
                self.model.add(place[first] <= place[second])

    # --- lookups -----------------------------------------------------------------------------

    def holders(self, j: int, type_number: int | None = None) -> list[cp_model.IntVar]:
        """Literals of the devices, all or of one type, to hold stage j."""
        return [
            self.on[j, d]
            for d, kind in enumerate(self.type_of)
            if type_number is None or kind == type_number
        ]

    def is_replicated(self, j: int) -> list[cp_model.IntVar]:
        """The literal that stage j has several replicas; no literal if it never can."""
        return [self.at_least[j, 2]] if (j, 2) in self.at_least else []

    def time(self, name: str = "") -> cp_model.IntVar:
        """A duration in ticks."""
        return self.model.new_int_var(0, self.horizon, name)

    def ticks(self, seconds: FloatArray) -> list[int]:
        """Durations in ticks, rounded down so that bounds stay valid."""
        return [int(x) for x in np.minimum(np.floor(seconds / self.tick_s), self.horizon)]

    def sums(self, per_layer: Sequence[int]) -> list[Expression]:
        """Per stage, the sum of a figure over its layers."""
        prefix = [0, *np.cumsum(np.array(per_layer, dtype=np.int64)).tolist()]
        at = [self.at(prefix, j) for j in range(len(self.stages) + 1)]
        return [at[j + 1] - at[j] for j in self.stages]

    def at(self, table: list[int], j: int) -> cp_model.IntVar:
        """The entry of a table at the position of boundary j."""
        value = self.model.new_int_var(0, max(table), "")
        self.model.add_element(self.boundary[j], table, value)
        return value

    def is_cut_at_most(self, j: int, position: int) -> cp_model.IntVar:
        """Literal of ``boundary[j] <= position``."""
        if (j, position) not in self._comparisons:
            literal = self.model.new_bool_var("")
            self.model.add(self.boundary[j] <= position).only_enforce_if(literal)
            self.model.add(self.boundary[j] >= position + 1).only_enforce_if(~literal)
            self._comparisons[j, position] = literal
        return self._comparisons[j, position]

    def all_of(self, literals: Sequence[cp_model.LiteralT]) -> cp_model.IntVar:
        """A literal that is true exactly if all are."""
        result = self.model.new_bool_var("")
        for literal in literals:
            self.model.add_implication(result, literal)
        self.model.add_bool_or([result, *(_negated(literal) for literal in literals)])
        return result


def _negated(literal: Expression) -> Expression:
    return ~literal
