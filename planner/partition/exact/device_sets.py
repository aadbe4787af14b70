"""Which devices hold which stage, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ortools.sat.python import cp_model

from planner.artifacts.cluster import Cluster

REPLICA_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Replica counts at which the all-reduce bound is sharpened; in between it is weaker but valid."""


class DeviceSets:
    """Literals of devices and replica counts; one stage a device.

    Attributes:
        on: ``on[j, d]``: device number d (in cluster order) holds stage j.
        at_least: ``at_least[j, n]``: stage j has n replicas or more, for n of REPLICA_STEPS;
            empty if replication is not allowed.
    """

    def __init__(
        self,
        model: cp_model.CpModel,
        cluster: Cluster,
        active: Sequence[cp_model.IntVar],
        *,
        replication: bool,
    ) -> None:
        self._model = model
        self._devices = cluster.device_names
        self._stages = range(len(active))
        self.on = {
            (j, d): model.new_bool_var(f"stage {j} on {name}")
            for j in self._stages
            for d, name in enumerate(self._devices)
        }
        self._hold_stages(active, replication=replication)
        self.at_least: dict[tuple[int, int], cp_model.IntVar] = {}
        if replication:
            self._count_replicas()

    def _hold_stages(self, active: Sequence[cp_model.IntVar], *, replication: bool) -> None:
        numbers = range(len(self._devices))
        for d in numbers:
            self._model.add_at_most_one(self.on[j, d] for j in self._stages)
        for j in self._stages:
            held = [self.on[j, d] for d in numbers]
            self._model.add_bool_or([~active[j], *held])
            for literal in held:
                self._model.add_implication(literal, active[j])
            if not replication:
                self._model.add_at_most_one(held)

    def _count_replicas(self) -> None:
        for j in self._stages:
            replicas = sum(self.on[j, d] for d in range(len(self._devices)))
            for count in (step for step in REPLICA_STEPS if step <= len(self._devices)):
                literal = self._model.new_bool_var(f"stage {j} has {count} replicas or more")
                self._model.add(replicas >= count).only_enforce_if(literal)
                self._model.add(replicas <= count - 1).only_enforce_if(~literal)
                self.at_least[j, count] = literal

    def order(self, groups: Sequence[Sequence[str]]) -> None:
        """Devices that are interchangeable hold stages in order, unused ones last."""
        count = len(self._stages)
        place = [
            sum(j * self.on[j, d] for j in self._stages)
            + count * (1 - sum(self.on[j, d] for j in self._stages))
            for d in range(len(self._devices))
        ]
        for group in groups:
            numbers = [self._devices.index(device) for device in group]
            for first, second in pairwise(numbers):
                self._model.add(place[first] <= place[second])
