"""The gradients of a plan that several devices sum, by the rules of docs/cost_model.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from planner.verification.plan_layers import PlanLayers
from planner.verification.routes import AllReduce, Routes


@dataclass(frozen=True)
class Reduction:
    """Gradients that are summed over several devices, whole or in parts.

    Attributes:
        stages: whose gradients.
        devices: that hold them.
        taken: what it takes of time and links.
        first_layer: the layer that the last backward has to have run; None: all of it.
        gathers: whether an all-gather follows the optimizer's step where devices share its state.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    taken: AllReduce
    first_layer: str | None = None
    gathers: bool = True


class PlanReductions:
    """Works out a plan's reductions.

    Args:
        layers: of the plan.
        routes: of its cluster.
    """

    def __init__(self, layers: PlanLayers, routes: Routes) -> None:
        self._all, self._routes = layers, routes

    def all(self) -> list[Reduction]:
        """Return those of single stages in order, then of tied parameters by their stages."""
        bytes_: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for name, stages in self._all.holders.items():
            if self._all.parameters[name].trainable and name not in self._all.divided:
                bytes_[tuple(sorted(stages))] += self._all.parameters[name].bytes
                for stage in stages if self._all.in_turn(stages) else ():
                    bytes_[(stage,)] += self._all.parameters[name].bytes
        rows: list[Reduction] = []
        for members in sorted(bytes_, key=lambda stages: (len(stages) > 1, stages)):
            if self._all.in_turn(members):
                rows += self._among_stages(members, bytes_[members])
                continue
            there = self._all.devices_of(members)
            devices = tuple(name for name in self._all.plan.cluster.device_names if name in there)
            if len(devices) > 1 and bytes_[members]:
                rows += self._reductions(members, devices, bytes_[members])
        return rows

    def _reductions(
        self,
        members: tuple[int, ...],
        devices: tuple[str, ...],
        bytes_: int,
    ) -> Iterator[Reduction]:
        """One reduction, or one for each bucket if buckets are reduced during backwards."""
        limit = self._all.plan.bucket_bytes
        way = self._routes.ring_half if self._all.plan.job.shards_state else self._routes.all_reduce
        if limit is None or len(members) > 1:
            yield Reduction(members, devices, way(devices, bytes_))
            return
        held, first = 0, ""
        for name, layer in self._gradients_made(members[0]):
            more = self._all.parameters[name].bytes
            if first and held + more > limit:
                yield Reduction(members, devices, way(devices, held), first)
                held = 0
            held, first = held + more, layer
        yield Reduction(members, devices, way(devices, held), first)

    def _among_stages(self, members: tuple[int, ...], bytes_: int) -> Iterator[Reduction]:
        """One all-reduce for the n-th replica of all of these stages."""
        for number in range(len(self._all.plan.stages[members[0]].devices)):
            there = {self._all.plan.stages[stage].devices[number] for stage in members}
            devices = tuple(name for name in self._all.plan.cluster.device_names if name in there)
            if len(devices) > 1 and bytes_:
                taken = self._routes.all_reduce(devices, bytes_)
                yield Reduction(members, devices, taken, gathers=False)

    def _gradients_made(self, stage: int) -> Iterator[tuple[str, str]]:
        """A stage's own gradients as a backward completes them, with the first user of each."""
        found: dict[str, str] = {}
        for layer in self._all.layers(stage):
            for name in layer.parameters:
                parameter = self._all.parameters[name]
                if not parameter.trainable or name in self._all.divided:
                    continue
                holders = self._all.holders[name]
                is_own = len(holders) == 1 or self._all.in_turn(holders)
                if parameter.bytes and is_own:
                    found.setdefault(name, layer.name)
        yield from reversed(found.items())
