"""Stages on their devices, with all times and sizes that a schedule needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.cluster.routing import Route
from planner.costs.reductions import Collectives, GradientReduction, ReductionTails
from planner.costs.roofline import OperationTimes
from planner.costs.stage_spec import StageSpec as StageSpec
from planner.errors import PipeplanError
from planner.plan.operations import Operation
from planner.plan.plan import Sync, overlaps_reductions
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RuntimeBehaviour

Resource = tuple[str, str] | str
"""What serves one message at a time: a pair of devices, or a device with one stream."""


@dataclass(frozen=True)
class Transfer:
    """One message between two devices: its duration, and what it occupies for so long.

    Attributes:
        seconds: that it takes alone, host time included.
        links: resources of links on its way.
        occupied: what serves one message at a time, of all that it needs.
        latency_s: of its seconds, those that no link is used in: latencies, host time, and the time
            in which a tensor-parallel group gathers what it has received in parts.
        gb_per_s: of its bytes, on links that it has to itself.
        ends: its source and target, which communicate meanwhile; none if nothing is sent.
        host_s: of its seconds, those of the runtime's host.
    """

    seconds: float
    links: tuple[tuple[int, int], ...] = ()
    occupied: tuple[Resource, ...] = ()
    latency_s: float = 0.0
    gb_per_s: float = math.inf
    ends: tuple[str, ...] = ()
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    """A stage with its figures; times and bytes are for one microbatch.

    Attributes:
        spec: the choices of the solver.
        times: times by device, where microbatches have several lengths in the mean.
        static_bytes: weights, gradients and optimizer state on each replica.
        workspace_bytes: held in addition to whole stashes while layers run: gradients, temporaries,
            and recomputed values.
        split_workspace_bytes: the same while a split input gradient runs; at least as much.
        stash_bytes: kept from forward until backward, including the received input; a recomputed
            layer keeps only its input.
        weight_stash_bytes: kept from a split input gradient until the weight gradient; a recomputed
            layer has run again by then.
        input_bytes, output_bytes: activations received from and sent to the neighbours.
        input_gradient_bytes, output_gradient_bytes: gradients sent back and received.
        sent_bytes, returned_bytes: activations and gradients sent, as many as the neighbour
            receives, in the mean over lengths of microbatches; all other figures are of the
            longest.
        gathered_bytes, returned_gathered_bytes: of these, what is sent in parts, which a
            tensor-parallel group gathers once it has received them.
        offload_bytes: of the stash, what is copied to the host after the forward and back before
            the backward.
        collective_s: seconds of the collectives of layers whose weights replicas divide, by layer;
            they are in the times.
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
    sent_bytes: int
    returned_bytes: int
    gathered_bytes: int = 0
    returned_gathered_bytes: int = 0
    offload_bytes: int = 0
    collective_s: Mapping[str, Collectives] = field(default_factory=dict)

    def least_s(self, kind: str) -> float:
        """Return the seconds of an operation, by its letter, on the fastest replica."""
        return min(times.seconds(kind) for times in self.times.values())


def static_with_workspace(stages: Sequence[PlacedStage]) -> int:
    """Return the static bytes of stages and the largest workspace, since they run one at a time."""
    workspaces = [stage.workspace_bytes for stage in stages]
    return sum(stage.static_bytes for stage in stages) + max(workspaces, default=0)


@dataclass(frozen=True)
class PlacedPipeline:
    """All stages on their devices: the input of scheduling and of simulation.

    Attributes:
        problem: that the stages solve.
        stages: in pipeline order.
        synchronisations: the buckets of each stage in the order in which they are filled, then
            those of tied parameters.
        optimizer_s: seconds of the optimizer step by device.
        microbatches: in an iteration.
        sync: the strategy of synchronisation, which sets the size of buckets.
    """

    problem: Problem
    stages: tuple[PlacedStage, ...]
    synchronisations: tuple[GradientReduction, ...]
    optimizer_s: Mapping[str, float]
    microbatches: int
    sync: Sync = field(default_factory=Sync)

    @cached_property
    def behaviour(self) -> RuntimeBehaviour:
        """How the runtime runs these stages."""
        return self.problem.runtime.behaviour_on(stage.spec.devices for stage in self.stages)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced in buckets while the last backwards still run."""
        return overlaps_reductions(self.problem.job, self.sync, self.behaviour)

    @cached_property
    def reduced_at_once(self) -> PlacedPipeline | None:
        """The same stages with each reduced in one piece; None where that is nothing new."""
        if not self.overlaps or not self.synchronisations:
            return None
        from planner.costs.placed_reductions import placed_reductions
        from planner.costs.stage_table import StageTable

        table = StageTable(self.problem, tuple(stage.spec for stage in self.stages))
        once, _ = placed_reductions(table, None)
        return replace(self, sync=Sync(options={"overlap": False}), synchronisations=once)

    def on_pipeline(self, devices: Sequence[str], count: int) -> PlacedPipeline:
        """Return one of equal pipelines with its share of the microbatches, rounded up.

        Gradients are reduced among all of them.

        Args:
            devices: that of each stage.
            count: of pipelines.
        """
        held = set(enumerate(devices))
        stages = [
            replace(row, spec=replace(row.spec, devices=(name,)), times={name: row.times[name]})
            for row, name in zip(self.stages, devices, strict=True)
        ]
        reductions = [
            replace(
                row,
                devices=tuple(name for name in row.devices if name in devices),
                ahead={pair: row.ahead[pair] for pair in row.ahead if pair in held},
            )
            for row in self.synchronisations
            if not set(devices).isdisjoint(row.devices)
        ]
        return replace(
            self,
            stages=tuple(stages),
            synchronisations=tuple(reductions),
            optimizer_s={name: self.optimizer_s[name] for name in devices},
            microbatches=-(-self.microbatches // count),
        )

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

    @cached_property
    def has_replicas(self) -> bool:
        """Whether a stage has several devices."""
        return any(len(stage.spec.devices) > 1 for stage in self.stages)

    @cached_property
    def shares_devices(self) -> bool:
        """Whether some device holds several stages."""
        return any(len(stages) > 1 for stages in self.stages_on.values())

    def split_extra_bytes(self, stage: int, device: str) -> int:
        """Return the bytes beyond :meth:`static_bytes` during a split input gradient."""
        counted = max(self.stages[other].workspace_bytes for other in self.stages_on[device])
        return max(0, self.stages[stage].split_workspace_bytes - counted)

    @cached_property
    def has_quicker_wholes(self) -> bool:
        """Whether some whole backward takes less time than its split parts."""
        return any(times.is_quicker_whole for s in self.stages for times in s.times.values())

    def seconds(self, stage: int, kind: str, device: str) -> float:
        """Return the duration of an operation."""
        return self.stages[stage].times[device].seconds(kind)

    def received(self, stage: int, kind: str) -> tuple[int, int]:
        """Return the bytes of the message that a stage receives before a forward, or a backward.

        Args:
            stage: the receiver.
            kind: F, or any other for a backward.

        Returns:
            All bytes, and those of them that a tensor-parallel group gathers then; 0 at the ends.
        """
        source = stage - 1 if kind == "F" else stage + 1
        if not 0 <= source < len(self.stages):
            return 0, 0
        row = self.stages[source]
        if kind == "F":
            return row.sent_bytes, row.gathered_bytes
        return row.returned_bytes, row.returned_gathered_bytes

    def received_s(self, stage: int, kind: str, device: str) -> float:
        """Return the seconds of such a message in which no link is used: host time, and gathering.

        Args:
            stage: the receiver.
            kind: F, or any other for a backward.
            device: of the receiver.
        """
        bytes_, gathered = self.received(stage, kind)
        group = self.problem.cluster.device_type(device).group if gathered else None
        gather_s = 0.0 if group is None else group.seconds("all_gather", gathered)
        return self.behaviour.message_s(bytes_) + gather_s

    def held_of_message(self, made: Operation) -> int:
        """Return the bytes that the receiver holds of a message, made by an operation."""
        if made.kind == "F":
            return self.stages[made.stage + 1].input_bytes
        return self.stages[made.stage - 1].output_gradient_bytes

    def transfers_s(self, stage: int, *, forward: bool) -> FloatArray:
        """Return the seconds of all transfers between a stage and the next, by their devices.

        Args:
            stage: the earlier one.
            forward: activations to the next stage, else gradients back.

        Returns:
            A row for each device of ``stage``, a column for each of the next; infinite without a
            path.
        """
        rows, columns = (
            [self.problem.cluster.numbers[name] for name in self.stages[n].spec.devices]
            for n in (stage, stage + 1)
        )
        target, kind = (stage + 1, "F") if forward else (stage, "B")
        bytes_, _ = self.received(target, kind)
        if bytes_ == 0:
            return np.zeros((len(rows), len(columns)))
        table, block = self.problem.cluster.link_table, np.ix_(rows, columns)
        if not forward:
            block = block[::-1]
        seconds = table.latency_s[block] + bytes_ * table.s_per_byte[block]
        devices = self.stages[target].spec.devices
        more_s = np.array([self.received_s(target, kind, device) for device in devices])
        is_sent = np.not_equal.outer(rows, columns)
        return np.asarray(seconds + (more_s if forward else more_s[:, None]) * is_sent)

    def transfer(self, stage: int, kind: str, source: str, target: str) -> Transfer:
        """Return the transfer of what a stage has made.

        Args:
            stage: the sender.
            kind: F, activations for the next stage; any other, gradients for the stage before.
            source: device of the sender.
            target: device of the receiver.

        Raises:
            PipeplanError: if no path joins the two.
        """
        to = stage + 1 if kind == "F" else stage - 1
        route, (bytes_, _) = self._route(source, target), self.received(to, kind)
        if source == target or bytes_ == 0:
            return Transfer(0.0)
        more_s = self.received_s(to, kind, target)
        return Transfer(
            route.seconds(bytes_) + more_s,
            route.links,
            self._waits_for(route, source, target),
            route.latency_s + more_s,
            route.bandwidth_gb_per_s,
            (source, target),
            self.behaviour.message_s(bytes_),
        )

    def _waits_for(self, route: Route, source: str, target: str) -> tuple[Resource, ...]:
        """Return what a message waits for: those of its pair, and streams."""
        streams = (source, target) if self.behaviour.streams == "one" else ()
        # Over links that any number may use at once, messages of one pair need not wait either.
        return (*([(source, target)] if route.links else []), *streams)

    def _route(self, source: str, target: str) -> Route:
        route = self.problem.cluster.route(source, target)
        if route is None:
            raise PipeplanError(
                f"no path of links and switches joins {source!r} and {target!r}, which hold "
                "neighbouring stages; add a link to the cluster or choose other devices"
            )
        return route

    def capacity_bytes(self, device: str) -> int:
        """Return the bytes that a plan may use on a device."""
        return self.problem.cluster.device_type(device).capacity_bytes

    def static_bytes(self, device: str) -> int:
        """Return the bytes in use at all times: static memory and the largest workspace.

        Stages of one device run one at a time.
        """
        stages = [self.stages[stage] for stage in self.stages_on[device]]
        return static_with_workspace(stages)

    def stash_limit(self, stage: int, device: str) -> int:
        """Return an upper bound on the microbatches of a stage in flight.

        At the start of a forward the device holds at least the stashes of all microbatches in
        flight and the output being produced, whatever the order.

        Args:
            stage: number of the stage.
            device: one of its replicas.
        """
        placed = self.stages[stage]
        made_bytes = placed.output_bytes if placed.least_s("F") else 0
        free = self.capacity_bytes(device) - self.static_bytes(device)
        # Of microbatches before, what is offloaded may be on the host; of this one it is here.
        free -= placed.offload_bytes
        kept_bytes = placed.stash_bytes - placed.offload_bytes
        return _fitting(free - made_bytes, kept_bytes, self.microbatches)

    def tail_s(self, stage: int, device: str) -> float:
        """Return the least time from a stage's last backward on this device to the end."""
        return self._tails.tail_s(stage, device) + self.optimizer_s[device]

    @cached_property
    def _tails(self) -> ReductionTails:
        return ReductionTails(self.problem.cluster, self.synchronisations, self.overlaps)


def _fitting(free_bytes: int, each_bytes: int, most: int) -> int:
    """Return how many of some size fit into free memory, at most as many as there are."""
    if free_bytes < 0:
        return 0
    return min(most, free_bytes // each_bytes) if each_bytes else most
