"""Seconds of a plan's operations, and what its devices hold, by docs/cost_model.md."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise, takewhile

from planner.model.graph_record import Layer
from planner.plan.plan import Plan
from planner.verification.layer_costs import ProblemCosts, Seconds, collective_s, summed_s
from planner.verification.plan_layers import PlanLayers
from planner.verification.reductions import PlanReductions, Reduction
from planner.verification.routes import Routes
from planner.verification.stage_bytes import stage_bytes


class PlanCosts:
    """Every time and size that the replay of a plan needs.

    Args:
        plan: of a form that holds: every layer in exactly one stage, no edge backwards.

    Attributes:
        problem: costs of single layers.
        layers: a stage's, see :meth:`PlanLayers.layers`.
        bytes: of each stage.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.problem = ProblemCosts(plan.cluster, plan.job)
        self.routes = Routes(plan.cluster)
        self.stages_on = {
            device: [stage.index for stage in plan.stages if device in stage.devices]
            for stage in plan.stages
            for device in stage.devices
        }
        self.devices = tuple(self.stages_on)
        self._layers = PlanLayers(plan)
        self.layers = self._layers.layers
        self._seconds: dict[tuple[int, str], Seconds] = {}
        self._before_s: dict[tuple[int, str, str, str], float] = {}
        self.bytes = [stage_bytes(self._layers, self.problem, stage) for stage in plan.stages]

    @cached_property
    def reductions(self) -> list[Reduction]:
        """Stages by themselves in order, then tied parameters by the stages that hold them."""
        return PlanReductions(self._layers, self.routes, self.problem).all()

    def seconds(self, stage: int, kind: str, device: str) -> float:
        """Return the seconds of an operation, summed in the order of the layer graph."""
        key = stage, self._plan.cluster.type_of(device)
        if key not in self._seconds:
            rows = [self.seconds_in(stage, layer, key[1]) for layer in self.layers(stage)]
            host_s = self._plan.behaviour.computation_us * 1e-6
            forward, inputs, weights, whole = (
                sum(column) + host_s for column in zip(*rows, strict=True)
            )
            self._seconds[key] = forward, inputs, weights, whole
        return self._seconds[key]["FIWB".index(kind)]

    def before_s(self, stage: int, layer: str, kind: str, device: str) -> float:
        """Return the seconds that an operation spends on the layers before one of a stage."""
        key = stage, layer, kind, self._plan.cluster.type_of(device)
        if key not in self._before_s:
            earlier = takewhile(lambda row: row.name != layer, self.layers(stage))
            rows = (self.seconds_in(stage, row, key[3])["FIWB".index(kind)] for row in earlier)
            self._before_s[key] = sum(rows)
        return self._before_s[key]

    def seconds_in(self, stage: int, layer: Layer, type_name: str) -> Seconds:
        """Return the seconds of a layer of a stage, with what its replicas put together for it."""
        forward, inputs, weights, whole = self.layer_seconds(layer, type_name)
        gather_s, sum_s = self.collective_s[stage].get(layer.name, (0.0, 0.0))
        return forward + gather_s, inputs + gather_s, weights + sum_s, whole + gather_s + sum_s

    def ring(self, stage: int) -> tuple[str, ...]:
        """Return the replicas of a stage in the order of the cluster."""
        there = set(self._plan.stages[stage].devices)
        return tuple(name for name in self._plan.cluster.device_names if name in there)

    @cached_property
    def collective_s(self) -> list[dict[str, tuple[float, float]]]:
        """The seconds of a gather of each layer's weights, and of a sum of its gradients, by stage.

        Rings of all stages share links; one of the same devices counts once.
        """
        held = [self._layers.in_parts(stage.index) for stage in self._plan.stages]
        rings = [self.ring(index) if row else () for index, row in enumerate(held)]
        edges = {ring: list(pairwise((*ring, ring[0]))) for ring in rings if ring}
        figures = iter(self.routes.step_figures([e for row in edges.values() for e in row]))
        of_ring = {ring: [next(figures) for _ in row] for ring, row in edges.items()}

        def seconds(ring: tuple[str, ...], bytes_: int) -> float:
            part, steps = bytes_ / len(ring), len(ring) - 1
            return steps * max(latency_s + part / width for latency_s, width in of_ring[ring])

        return [
            {
                name: (
                    seconds(ring, sum(row.bytes for row in rows)),
                    seconds(ring, sum(map(self.problem.gradient_bytes, rows))),
                )
                for name, rows in of_stage.items()
            }
            for ring, of_stage in zip(rings, held, strict=True)
        ]

    def layer_seconds(self, layer: Layer, type_name: str) -> Seconds:
        """Return the seconds of one layer, with its forward again where it is recomputed."""
        forward, inputs, weights, whole = self.problem.seconds(layer, type_name)
        is_rerun = layer.name in self._layers.rerun
        again = self.problem.seconds(layer, type_name, loading=False)[0] if is_rerun else 0.0
        return forward, inputs + again, weights, whole + again

    def gather_s(self, bytes_: int, device: str) -> float:
        """Return the seconds in which a group makes whole tensors of the parts that it received."""
        return collective_s(self._plan.cluster.device_type(device), "all_gather", bytes_)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of the step; a parameter that several stages hold counts once."""
        layers = [layer for stage in self.stages_on[device] for layer in self.layers(stage)]
        held = [parameter for parameter in self._layers.held(layers) if parameter.trainable]
        sharers = self._layers.sharers
        moved = sum(self.problem.stepped_bytes(row) / sharers.get(row.name, 1) for row in held)
        kind = self._plan.cluster.device_type(device)
        step_s = moved / (kind.memory_bandwidth_gb_per_s * kind.optimizer_efficiency * 1e9)
        return step_s + summed_s(self.problem, held, kind)

    def copy_s(self, stage: int, device: str) -> float:
        """Return the seconds in which what a stage offloads passes a device's host link."""
        rate = self._plan.cluster.device_type(device).host_link_gb_per_s
        return self.bytes[stage].offloaded / (rate * 1e9) if rate else math.inf

    def capacity_bytes(self, device: str) -> int:
        """Return the bytes that a plan may use."""
        return self.problem.capacity_bytes(self._plan.cluster.type_of(device))

    def constant_bytes(self, device: str) -> int:
        """Held at all times: static memory and the largest workspace."""
        rows = [self.bytes[stage] for stage in self.stages_on[device]]
        return sum(row.static for row in rows) + max(row.workspace for row in rows)

    def split_bytes(self, stage: int, device: str) -> int:
        """Held on top of that while an input gradient of the stage runs apart."""
        counted = max(self.bytes[other].workspace for other in self.stages_on[device])
        return max(0, self.bytes[stage].split_workspace - counted)
