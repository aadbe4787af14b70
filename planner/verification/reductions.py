"""The gradients of a plan that several devices sum, by the rules of docs/cost_model.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.model.graph_record import Parameter
from planner.verification.layer_costs import ProblemCosts
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
        gathered: what an all-gather of parameters takes after the optimizer's step; None: none
            follows.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    taken: AllReduce
    first_layer: str | None = None
    gathered: AllReduce | None = None


class PlanReductions:
    """Works out a plan's reductions.

    Args:
        layers: of the plan.
        routes: of its cluster.
        costs: of single parameters.
    """

    def __init__(self, layers: PlanLayers, routes: Routes, costs: ProblemCosts) -> None:
        self._all, self._routes, self._costs = layers, routes, costs

    def all(self) -> list[Reduction]:
        """Return those of single stages in order, then of tied parameters by their stages."""
        held: defaultdict[tuple[int, ...], list[Parameter]] = defaultdict(list)
        for name, stages in self._all.holders.items():
            parameter = self._all.parameters[name]
            if parameter.trainable and name not in self._all.divided:
                held[tuple(sorted(stages))].append(parameter)
                for stage in stages if self._all.in_turn(stages) else ():
                    held[(stage,)].append(parameter)
        rows: list[Reduction] = []
        for members in sorted(held, key=lambda stages: (len(stages) > 1, stages)):
            if self._all.in_turn(members):
                rows += self._among_stages(members, self._summed_bytes(held[members]))
                continue
            there = self._all.devices_of(members)
            devices = tuple(name for name in self._all.plan.cluster.device_names if name in there)
            if len(devices) > 1 and any(row.bytes for row in held[members]):
                rows += self._reductions(members, devices, held[members])
        return rows

    def _summed_bytes(self, parameters: Iterable[Parameter]) -> int:
        return sum(map(self._costs.gradient_bytes, parameters))

    def _reductions(
        self,
        members: tuple[int, ...],
        devices: tuple[str, ...],
        parameters: Sequence[Parameter],
    ) -> Iterator[Reduction]:
        """One reduction, or one for each bucket if buckets are reduced during backwards."""
        limit = self._all.plan.bucket_bytes
        if limit is None or len(members) > 1:
            yield self._reduction(members, devices, parameters)
            return
        held: list[Parameter] = []
        first = ""
        for name, layer in self._gradients_made(members[0]):
            more = self._all.parameters[name]
            if held and self._summed_bytes([*held, more]) > limit:
                yield self._reduction(members, devices, held, first)
                held = []
            held, first = [*held, more], layer
        yield self._reduction(members, devices, held, first)

    def _reduction(
        self,
        members: tuple[int, ...],
        devices: tuple[str, ...],
        parameters: Iterable[Parameter],
        first_layer: str | None = None,
    ) -> Reduction:
        """Sum gradients whole, or in parts if devices then gather parts of the parameters."""
        rows = list(parameters)
        summed, routes = self._summed_bytes(rows), self._routes
        if not self._all.plan.job.shards_state:
            return Reduction(members, devices, routes.all_reduce(devices, summed), first_layer)
        gathered = routes.ring_half(devices, sum(row.bytes for row in rows))
        taken = routes.ring_half(devices, summed)
        return Reduction(members, devices, taken, first_layer, gathered)

    def _among_stages(self, members: tuple[int, ...], bytes_: int) -> Iterator[Reduction]:
        """One all-reduce for the n-th replica of all of these stages."""
        for number in range(len(self._all.plan.stages[members[0]].devices)):
            there = {self._all.plan.stages[stage].devices[number] for stage in members}
            devices = tuple(name for name in self._all.plan.cluster.device_names if name in there)
            if len(devices) > 1 and bytes_:
                taken = self._routes.all_reduce(devices, bytes_)
                yield Reduction(members, devices, taken)

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
