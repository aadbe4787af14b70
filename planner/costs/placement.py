"""A partition placed on devices, with every time and size its schedule needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.artifacts.graph_record import Parameter
from planner.artifacts.link_table import FloatArray
from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.artifacts.routing import Route
from planner.costs.collectives import all_reduce_s, fastest_all_reduce_s
from planner.costs.roofline import OperationTimes, layer_times
from planner.costs.stage_bytes import stage_bytes
from planner.errors import PipeplanError


@dataclass(frozen=True)
class StageSpec:
    """A stage as a solver chooses it: its layers, its devices and what it recomputes."""

    layers: tuple[str, ...]
    devices: tuple[str, ...]
    recompute: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """One message between two devices: the link resources it occupies and for how long."""

    seconds: float
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlacedStage:
    """A stage with its figures; times and bytes are for one microbatch.

    Attributes:
        spec: what the solver chose.
        times: by device.
        static_bytes: weights, gradients and optimizer state on each replica.
        workspace_bytes: beside these and whole stashes while one of its layers runs.
        split_workspace_bytes: the same while an input gradient runs apart, no less.
        stash_bytes: kept from forward until backward, the received input included.
        weight_stash_bytes: kept from a separate input gradient until the weight gradient.
        input_bytes, output_bytes: activations received from and sent to the neighbours.
        input_gradient_bytes, output_gradient_bytes: gradients sent back and received.
    """

    spec: StageSpec
    times: Mapping[str, OperationTimes]
    static_bytes: int
    workspace_bytes: int
    split_workspace_bytes: int
    stash_bytes: int
    weight_stash_bytes: int
    input_bytes: int
    output_bytes: int
    input_gradient_bytes: int
    output_gradient_bytes: int

    def tight_bytes(self) -> int:
        """Held beside the stashes at some moment of every schedule, if backwards are whole.

        When a device holds most stashes of a stage, a forward is making an output; the next
        backward finds as many stashes, receives gradients and makes some. What an operation of no
        length makes may be gone at once.
        """
        if not self.least_s("B"):
            return self.making_bytes()
        gradients = self.input_gradient_bytes + self.output_gradient_bytes
        return max(self.making_bytes(), gradients)

    def making_bytes(self) -> int:
        """Held beside the stashes while a forward runs: its output."""
        return self.output_bytes if self.least_s("F") else 0

    def least_s(self, kind: str) -> float:
        """Seconds of an operation, by its letter, on the fastest replica."""
        return min(times.seconds(kind) for times in self.times.values())


def static_with_workspace(stages: Sequence[PlacedStage]) -> int:
    """Static bytes of stages that run one at a time, and the largest of their workspaces."""
    workspaces = [stage.workspace_bytes for stage in stages]
    return sum(stage.static_bytes for stage in stages) + max(workspaces, default=0)


@dataclass(frozen=True)
class Synchronisation:
    """An all-reduce of gradients, after the last backward of ``stages`` on ``devices``."""

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PlacedPipeline:
    """All stages on their devices: what a schedule is made for and a simulation replays."""

    problem: Problem
    stages: tuple[PlacedStage, ...]
    synchronisations: tuple[Synchronisation, ...]
    optimizer_s: Mapping[str, float]
    microbatches: int

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Devices that hold a stage, in stage order."""
        return tuple(dict.fromkeys(d for stage in self.stages for d in stage.spec.devices))

    @cached_property
    def stages_on(self) -> Mapping[str, tuple[int, ...]]:
        """Stage indices by device."""
        return {
            device: tuple(i for i, s in enumerate(self.stages) if device in s.spec.devices)
            for device in self.devices
        }

    def split_extra_bytes(self, stage: int, device: str) -> int:
        """What a device holds beside :meth:`static_bytes` while an input gradient runs apart."""
        counted = max(self.stages[other].workspace_bytes for other in self.stages_on[device])
        return max(0, self.stages[stage].split_workspace_bytes - counted)

    @cached_property
    def has_quicker_wholes(self) -> bool:
        """Whether some whole backward takes less time than its halves."""
        return any(times.is_quicker_whole for s in self.stages for times in s.times.values())

    def seconds(self, stage: int, kind: str, device: str) -> float:
        """Duration of an operation."""
        return self.stages[stage].times[device].seconds(kind)

    def forward_transfer(self, stage: int, source: str, target: str) -> Transfer:
        """The activations of ``stage`` on their way to the next stage."""
        return self._transfer(self.stages[stage].output_bytes, source, target)

    def backward_transfer(self, stage: int, source: str, target: str) -> Transfer:
        """The gradients of ``stage``'s input on their way to the stage before."""
        return self._transfer(self.stages[stage].input_gradient_bytes, source, target)

    def transfers_s(self, stage: int, *, forward: bool) -> FloatArray:
        """Seconds of all transfers between a stage and the next, by their devices.

        Args:
            stage: the earlier one.
            forward: activations to the next stage, else gradients back.

        Returns:
            A row for each device of ``stage``, a column for each of the next; infinite where no
            path joins two.
        """
        here, there = self.stages[stage], self.stages[stage + 1]
        bytes_ = here.output_bytes if forward else here.output_gradient_bytes
        numbers, table = self.problem.cluster.numbers, self.problem.cluster.link_table
        rows, columns = ([numbers[d] for d in side.spec.devices] for side in (here, there))
        if bytes_ == 0:
            return np.zeros((len(rows), len(columns)))
        block = np.ix_(rows, columns) if forward else np.ix_(columns, rows)
        seconds = table.latency_s[block] + bytes_ * table.s_per_byte[block]
        return np.asarray(seconds if forward else seconds.T)

    def _transfer(self, bytes_: int, source: str, target: str) -> Transfer:
        route = self._route(source, target)
        if source == target or bytes_ == 0:
            return Transfer(0.0, ())
        return Transfer(route.seconds(bytes_), route.links)

    def _route(self, source: str, target: str) -> Route:
        route = self.problem.cluster.route(source, target)
        if route is None:
            raise PipeplanError(
                f"no path of links and switches joins {source!r} and {target!r}, which hold "
                "neighbouring stages; add a link to the cluster or choose other devices"
            )
        return route

    def capacity_bytes(self, device: str) -> int:
        """Bytes a plan may use on a device."""
        return self.problem.cluster.device_type(device).capacity_bytes

    def static_bytes(self, device: str) -> int:
        """Bytes that count on a device at all times: static memory, and the largest workspace.

        Stages of one device run one at a time.
        """
        stages = [self.stages[stage] for stage in self.stages_on[device]]
        return static_with_workspace(stages)

    def stash_limit(self, stage: int, device: str, *, whole_backwards: bool = False) -> int:
        """How many microbatches of a stage could be in flight if the device held nothing else.

        An upper bound for every order: at the start of a forward the device holds the stash of
        all microbatches in flight and the output being made.

        Args:
            stage: its number.
            device: one of its replicas.
            whole_backwards: of orders without weight gradients apart, which may need more.
        """
        placed = self.stages[stage]
        beside = placed.tight_bytes() if whole_backwards else placed.making_bytes()
        free = self.capacity_bytes(device) - self.static_bytes(device) - beside
        if free < 0:
            return 0
        if placed.stash_bytes == 0:
            return self.microbatches
        return min(self.microbatches, free // placed.stash_bytes)

    def tail_s(self, stage: int, device: str) -> float:
        """From a stage's last backward to the end of the iteration on this device, at least."""
        own = (
            s.seconds for s in self.synchronisations if stage in s.stages and device in s.devices
        )
        return sum(own) + self.optimizer_s[device]

    def least_reduction_s(self, stage: int) -> float:
        """All-reduces after a stage's last backward, each over the best order of its devices."""
        cluster = self.problem.cluster
        return sum(
            fastest_all_reduce_s(cluster, sync.devices, sync.bytes)
            for sync in self.synchronisations
            if stage in sync.stages
        )


def place(problem: Problem, stages: Sequence[StageSpec]) -> PlacedPipeline:
    """Work out the figures of a partition.

    Args:
        problem: the model, cluster and job.
        stages: in pipeline order; every layer in exactly one, no edge backwards.
    """
    parameters = [problem.graph.parameters_of(stage.layers) for stage in stages]
    placed = tuple(
        PlacedStage(
            spec=spec,
            times=_times(problem, spec),
            static_bytes=static_bytes(problem, held),
            workspace_bytes=row.workspace,
            split_workspace_bytes=row.split_workspace,
            stash_bytes=row.stash,
            weight_stash_bytes=row.weight_stash,
            input_bytes=row.input,
            output_bytes=row.output,
            input_gradient_bytes=row.input_gradient,
            output_gradient_bytes=row.output_gradient,
        )
        for spec, held, row in zip(
            stages, parameters, stage_bytes(problem.graph, stages), strict=True
        )
    )
    return PlacedPipeline(
        problem=problem,
        stages=placed,
        synchronisations=_synchronisations(problem, stages, parameters),
        optimizer_s=_optimizer_s(problem, stages, parameters),
        microbatches=problem.job.microbatches,
    )


def place_plan(plan: Plan) -> PlacedPipeline:
    """A plan's stages with the times and sizes that its cluster, job and graph give them."""
    specs = [StageSpec(stage.layers, stage.devices, stage.recompute) for stage in plan.stages]
    return place(plan.problem, specs)


def _times(problem: Problem, spec: StageSpec) -> dict[str, OperationTimes]:
    """Seconds of a stage's operations on each of its devices."""
    type_of = {device: problem.cluster.type_of(device) for device in spec.devices}
    times = {kind: _times_on(problem, spec, kind) for kind in dict.fromkeys(type_of.values())}
    return {device: times[kind] for device, kind in type_of.items()}


def _times_on(problem: Problem, spec: StageSpec, type_name: str) -> OperationTimes:
    kind, again = problem.cluster.device_types[type_name], set(spec.recompute)
    rows = [
        layer_times(
            problem.graph.layers[name], type_name, kind, problem.job.precision, name in again
        )
        for name in spec.layers
    ]
    return OperationTimes(*(sum(column) for column in zip(*rows, strict=True)))


def static_bytes(problem: Problem, parameters: Sequence[Parameter]) -> int:
    """Weights, gradients and optimizer state of parameters."""
    per_element = problem.job.optimizer_bytes_per_element
    return sum(
        p.bytes + (p.bytes + per_element * p.elements if p.trainable else 0) for p in parameters
    )


def _tied_parameters(parameters: Sequence[Sequence[Parameter]]) -> dict[str, tuple[int, ...]]:
    """Trainable parameters held by several stages, with these stages."""
    holders: dict[str, list[int]] = {}
    for index, held in enumerate(parameters):
        for parameter in held:
            if parameter.trainable:
                holders.setdefault(parameter.name, []).append(index)
    return {name: tuple(held) for name, held in holders.items() if len(held) > 1}


def _synchronisations(
    problem: Problem, stages: Sequence[StageSpec], parameters: Sequence[Sequence[Parameter]]
) -> tuple[Synchronisation, ...]:
    graph, tied = problem.graph, _tied_parameters(parameters)
    wanted: dict[tuple[int, ...], int] = {}
    for index, held in enumerate(parameters):
        wanted[(index,)] = sum(p.bytes for p in held if p.trainable and p.name not in tied)
    for name, holders in tied.items():
        wanted[holders] = wanted.get(holders, 0) + graph.parameters[name].bytes
    rows = []
    for group, bytes_ in wanted.items():
        members = {device for index in group for device in stages[index].devices}
        devices = tuple(d for d in problem.cluster.device_names if d in members)
        if len(devices) > 1 and bytes_:
            seconds = all_reduce_s(problem.cluster, devices, bytes_)
            rows.append(Synchronisation(group, devices, bytes_, seconds))
    return tuple(rows)


def _optimizer_s(
    problem: Problem, stages: Sequence[StageSpec], parameters: Sequence[Sequence[Parameter]]
) -> dict[str, float]:
    """Seconds of the optimizer step: it reads and writes weights and state, reads gradients."""
    stages_on: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        for device in stage.devices:
            stages_on[device] = (*stages_on.get(device, ()), index)
    moved = {
        group: _optimizer_traffic_bytes(problem, [parameters[index] for index in group])
        for group in set(stages_on.values())
    }
    return {
        device: moved[group] / (problem.cluster.device_type(device).memory_bandwidth_gb_per_s * 1e9)
        for device, group in stages_on.items()
    }


def _optimizer_traffic_bytes(problem: Problem, parameters: Sequence[Sequence[Parameter]]) -> int:
    """Of the stages of one device, a parameter that several of them hold once."""
    per_element = problem.job.optimizer_bytes_per_element
    held = {p.name: p for row in parameters for p in row if p.trainable}
    return sum(3 * p.bytes + 2 * per_element * p.elements for p in held.values())


def is_connected(placed: PlacedPipeline) -> bool:
    """Whether every transfer and every all-reduce of the pipeline has a path."""
    return _is_joined(placed) and all(math.isfinite(s.seconds) for s in placed.synchronisations)


def _is_joined(placed: PlacedPipeline) -> bool:
    """Whether there is a path between all devices of neighbouring stages."""
    cluster = placed.problem.cluster
    for first, second in pairwise(placed.stages):
        rows, columns = (
            [cluster.numbers[device] for device in side.spec.devices] for side in (first, second)
        )
        if not np.isfinite(cluster.link_table.latency_s[np.ix_(rows, columns)]).all():
            return False
    return True
