"""Seconds and bytes of a plan's stages by the formulas of docs/cost_model.md and docs/memory.md."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from math import ceil

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType, TileShape
from planner.job import Job
from planner.model.figures import PHASES, Work
from planner.model.graph_record import Boundary, Layer, Parameter
from planner.plan.plan import Plan, Stage
from planner.verification.routes import AllReduce, Path, Routes

_STATE_BYTES = {"adamw": 8, "sgd_momentum": 4, "sgd": 0}
"""Bytes of the moments of one element in float32."""
_FIGURES_OF_CLASS = ("efficiency", "bandwidth_efficiency", "ramp_up_us")
_TOTALS = tuple(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes"))
Seconds = tuple[float, float, float, float]
"""Seconds of the operations F, I, W and B."""


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


@dataclass(frozen=True)
class CheckedStageBytes:
    """What a stage holds and hands on, for one microbatch; the names are those of docs/memory.md.

    Attributes:
        static: weights, gradients and optimizer state.
        workspace: while whole backwards run.
        split_workspace: while an input gradient runs apart.
        stash: from the forward until the backward, with what is received.
        weight_stash: from the input gradient until the weight gradient.
        received, sent: activations.
        gradient_sent, gradient_received: their gradients.
        message, gradient_message: bytes of messages onwards and back. Where microbatches have
            several lengths these are the mean, and all others of the longest.
        gathered, gradient_gathered: of these, what arrives in parts.
        offloaded: of the stash, what goes to the host between forward and backward.
        gradients: of the static bytes, gradients that the first backward makes.
        first_backward: beside whole stashes and the rest of the static bytes, while that runs.
        first_weights: the same where its weight gradient runs apart.
    """

    static: int
    workspace: int
    split_workspace: int
    stash: int
    weight_stash: int
    received: int
    sent: int
    gradient_sent: int
    gradient_received: int
    message: int
    gradient_message: int
    gathered: int
    gradient_gathered: int
    offloaded: int
    gradients: int
    first_backward: int
    first_weights: int


class ProblemCosts:
    """Times and sizes of single layers and parameters, whatever the stages.

    Args:
        cluster: whose device types count.
        job: whose precision and optimizer count.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job

    def seconds(self, layer: Layer, type_name: str) -> Seconds:
        """Return the seconds of one layer that is not recomputed."""
        if layer.lengths:
            return _weighed(layer, (self.seconds(row, type_name) for row in at_lengths(layer)))
        forward, inputs, weights, whole = self.loaded(layer, type_name)
        rate = self._cluster.device_types[type_name].loader_gb_per_s
        waited_s = 0.0 if rate is None else layer.batch_bytes / (rate * 1e9)
        return forward + waited_s, inputs, weights, whole

    def loaded(self, layer: Layer, type_name: str) -> Seconds:
        """Return the same where the batch is there."""
        if layer.lengths:
            return _weighed(layer, (self.loaded(row, type_name) for row in at_lengths(layer)))
        measured, device = layer.measured.get(type_name), self._cluster.device_types[type_name]
        if measured is not None:
            forward, inputs = measured.forward_s, measured.input_gradient_s
            weights, whole = measured.weight_gradient_s, measured.backward_s
        else:
            whole = None
            forward, inputs, weights = (self.roofline(layer, phase, device)[0] for phase in PHASES)
        sent = [exchanging_s(layer, phase, device) for phase in PHASES]
        backward = inputs + weights if whole is None else whole
        return forward + sent[0], inputs + sent[1], weights + sent[2], backward + sent[1] + sent[2]

    def roofline(self, layer: Layer, phase: str, device: DeviceType) -> tuple[float, bool]:
        """Seconds of a phase, and whether a lower throughput would lengthen it."""
        copied_s = 0.0
        if phase == "forward" and device.host_link_gb_per_s is not None:
            copied_s = layer.batch_bytes / device.host_link_gb_per_s * 1e-9
        if layer.work:
            rows = [self._work(row, layer, device) for row in layer.work if row.phase == phase]
            return copied_s + sum(seconds for seconds, _ in rows), any(bound for _, bound in rows)
        peak = device.peak_tflop_per_s[self._job.precision] * 1e12
        bandwidth = device.memory_bandwidth_gb_per_s * 1e9 * device.bandwidth_efficiency
        flops, traffic = getattr(layer, f"{phase}_flops"), getattr(layer, f"{phase}_traffic_bytes")
        arithmetic_s, traffic_s = flops / (peak * device.efficiency), traffic / bandwidth
        by_throughput = flops > 0 and arithmetic_s >= traffic_s
        return copied_s + max(arithmetic_s, traffic_s), by_throughput

    def _work(self, work: Work, layer: Layer, device: DeviceType) -> tuple[float, bool]:
        # Fused kernels skip what a causal mask leaves out.
        flops = work.flops / 2 if work.operation_class == "causal_attention" else work.flops
        if work.operation_class == "product" and device.tiles is not None and layer.products:
            flops *= padded_flops(layer, work.phase, device.tiles) / padded_flops(layer, "", None)
        name = "attention" if work.operation_class == "causal_attention" else work.operation_class
        of_class = device.by_class.get(name)
        told = {} if of_class is None else of_class.model_dump(exclude_none=True)
        efficiency, share, ramp_up_us = (
            told.get(field, getattr(device, field)) for field in _FIGURES_OF_CLASS
        )
        precision = self._job.precision
        tf32 = precision == "float32" and name == "convolution"
        peaks = device.peak_tflop_per_s
        peak = peaks.get("tf32", peaks[precision]) if tf32 else peaks[precision]
        arithmetic_s = flops / (peak * 1e12 * efficiency) + work.operations * ramp_up_us * 1e-6
        arithmetic_s = arithmetic_s if flops else 0.0
        traffic_s = work.traffic_bytes / (device.memory_bandwidth_gb_per_s * 1e9 * share)
        overhead_s = work.operations * device.operation_overhead_us * 1e-6
        return max(arithmetic_s, traffic_s) + overhead_s, bool(flops) and arithmetic_s >= traffic_s

    def capacity_bytes(self, type_name: str) -> int:
        """Return the bytes that a plan may use of a device."""
        kind = self._cluster.device_types[type_name]
        return int((kind.memory_gib - kind.reserved_gib) * 2**30)

    def state_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of the optimizer's state of a parameter."""
        job = self._job
        an_element = _STATE_BYTES[job.optimizer] * (2 if job.precision == "float64" else 1)
        masters = 4 if job.precision in ("float16", "bfloat16") else 0
        return (an_element + masters) * parameter.elements

    def static_bytes(
        self, parameter: Parameter, sharers: int = 1, *, in_parts: bool = False
    ) -> int:
        """Return the bytes of a parameter's weights, gradients and optimizer state on a device.

        Args:
            parameter: which.
            sharers: devices that share its state, the elements as evenly as they can.
            in_parts: whether they divide its weights and gradients too.
        """
        if not parameter.trainable:
            return parameter.bytes
        elements = math.ceil(parameter.elements / sharers)
        part = parameter.model_copy(update={"elements": elements})
        whole = math.ceil(parameter.bytes / sharers) if in_parts else parameter.bytes
        return 2 * whole + self.state_bytes(part)


def at_lengths(layer: Layer) -> list[Layer]:
    """Return what a layer does at each of its lengths."""
    return [
        layer.model_copy(
            update={
                "work": row.work,
                "batch_bytes": row.batch_bytes,
                "products": row.products,
                "measured": row.measured,
                "lengths": (),
                **({} if row.work else dict.fromkeys(_TOTALS, 0)),
            }
        )
        for row in layer.lengths
    ]


def _weighed(layer: Layer, seconds: Iterable[Seconds]) -> Seconds:
    """Return the mean of the seconds at a layer's lengths by how many microbatches have each."""
    sums = [0.0] * 4
    for row, of_length in zip(layer.lengths, seconds, strict=True):
        for number, value in enumerate(of_length):
            sums[number] += value * row.share
    return sums[0], sums[1], sums[2], sums[3]


def moved_bytes(tensor: Boundary) -> int:
    """Return what a message of a tensor has, of several lengths in the mean, rounded down.

    Of what is sent in parts all devices of a group together send one whole tensor.
    """
    if not tensor.lengths:
        return tensor.bytes // tensor.parts
    return math.floor(sum(row.bytes * row.share for row in tensor.lengths))


def padded_flops(layer: Layer, phase: str, tiles: TileShape | None) -> float:
    """Return the FLOPs of a phase's products where each fills whole waves of tiles.

    Without tiles: the FLOPs of the products themselves.
    """
    total = 0.0
    for row in layer.products:
        over = {"input_gradient": row.columns, "weight_gradient": row.rows}.get(phase, row.inner)
        high = row.inner if phase == "weight_gradient" else row.rows
        wide = row.inner if phase == "input_gradient" else row.columns
        elements = float(row.batch * high * wide)
        if tiles is not None:
            count = row.batch * ceil(high / tiles.rows) * ceil(wide / tiles.columns)
            waves = ceil(count / tiles.at_once)
            elements = float(waves * tiles.at_once * tiles.rows * tiles.columns)
        total += 2 * over * elements
    return total


def exchanging_s(layer: Layer, phase: str, device: DeviceType) -> float:
    """Return the seconds of collectives inside a tensor-parallel group."""
    if device.group is None:
        return 0.0
    ways = device.group.collectives
    return sum(
        min(way.latency_us / 1e6 + row.bytes / (way.gb_per_s * 1e9) for way in ways[row.kind])
        for row in layer.collectives
        if row.phase == phase and row.bytes
    )


def _summed_s(parameters: Iterable[Parameter], kind: DeviceType) -> float:
    """Return the seconds in which a group sums gradients of what each of its devices has whole."""
    if kind.group is None:
        return 0.0
    bytes_ = sum(row.bytes for row in parameters if row.summed) // kind.group.devices
    ways = kind.group.collectives["all_reduce"] if bytes_ else ()
    return min((w.latency_us / 1e6 + bytes_ / (w.gb_per_s * 1e9) for w in ways), default=0.0)


class PlanCosts:
    """Every time and size that the replay of a plan needs.

    Args:
        plan: of a form that holds: every layer in exactly one stage, no edge backwards.

    Attributes:
        problem: costs of single layers.
        shares_state: whether devices that reduce a gradient share the optimizer's state of it, so
            that reductions are reduce-scatters and all-gathers follow the optimizer's step.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.shares_state = plan.job.shards_state
        self.problem = ProblemCosts(plan.cluster, plan.job)
        self._graph = plan.model.graph
        self._graphs = [
            self._graph.on_types.get(plan.cluster.type_of(stage.devices[0]), self._graph)
            for stage in plan.stages
        ]
        self._stage_of = {name: stage.index for stage in plan.stages for name in stage.layers}
        self._rerun = {name for stage in plan.stages for name in stage.recompute}
        self._made: defaultdict[str, list[Boundary]] = defaultdict(list)
        self._used: defaultdict[str, list[Boundary]] = defaultdict(list)
        for graph in {id(graph): graph for graph in self._graphs}.values():
            own = {name for name, stage in self._stage_of.items() if self._graphs[stage] is graph}
            for tensor in graph.boundaries:
                if tensor.producer in own:
                    self._made[tensor.producer].append(tensor)
                for user in tensor.users:
                    if user in own:
                        self._used[user].append(tensor)
        # Stages that share a parameter have it on devices alike.
        sizes = [{row.name: row for row in graph.parameters} for graph in self._graphs]
        self._parameters = {
            name: sizes[self._stage_of[layer.name]][name]
            for layer in self._graph.layers
            for name in layer.parameters
        }
        self.routes = Routes(plan.cluster)
        self.stages_on = {
            device: [stage.index for stage in plan.stages if device in stage.devices]
            for stage in plan.stages
            for device in stage.devices
        }
        self.devices = tuple(self.stages_on)
        self._seconds: dict[tuple[int, str], Seconds] = {}
        self.bytes = [self._stage_bytes(stage) for stage in plan.stages]
        self._before_s: dict[tuple[int, str, str, str], float] = {}

    # --- seconds ----------------------------------------------------------------------------------

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

    def layers(self, stage: int) -> list[Layer]:
        """Return a stage's layers in the order of the layer graph."""
        rows = self._graphs[stage].layers
        return [row for row in rows if self._stage_of[row.name] == stage]

    def seconds_in(self, stage: int, layer: Layer, type_name: str) -> Seconds:
        """Return the seconds of a layer of a stage, with what its replicas put together for it."""
        forward, inputs, weights, whole = self.layer_seconds(layer, type_name)
        each = self.collective_s(stage).get(layer.name, 0.0)
        return forward + each, inputs + each, weights + each, whole + 2 * each

    def in_parts(self, stage: int) -> dict[str, int]:
        """Return the bytes of the weights, by layer, that each replica of a stage has a part of.

        They are trained, and no other layer uses them.
        """
        if not self._plan.job.shards_parameters or len(self._plan.stages[stage].devices) == 1:
            return {}
        found = {}
        for layer in self.layers(stage):
            names = [name for name in self._divided if name in layer.parameters]
            bytes_ = sum(self._parameters[name].bytes for name in names)
            if bytes_:
                found[layer.name] = bytes_
        return found

    @cached_property
    def _divided(self) -> set[str]:
        if not self._plan.job.shards_parameters:
            return set()
        used = Counter(name for row in self._graph.layers for name in set(row.parameters))
        return {n for n, count in used.items() if count == 1 and self._parameters[n].trainable}

    def ring(self, stage: int) -> tuple[str, ...]:
        """Return the replicas of a stage in the order of the cluster."""
        there = set(self._plan.stages[stage].devices)
        return tuple(name for name in self._plan.cluster.device_names if name in there)

    def collective_s(self, stage: int) -> dict[str, float]:
        """Return the seconds of one gather of a layer's weights, or one sum of its gradients."""
        return self._collective_s[stage]

    @cached_property
    def _collective_s(self) -> list[dict[str, float]]:
        """The same of all stages, whose rings share links; one of the same devices counts once."""
        held = [self.in_parts(stage.index) for stage in self._plan.stages]
        rings = [self.ring(index) if row else () for index, row in enumerate(held)]
        edges = {ring: list(pairwise((*ring, ring[0]))) for ring in rings if ring}
        figures = iter(self.routes.step_figures([e for row in edges.values() for e in row]))
        of_ring = {ring: [next(figures) for _ in row] for ring, row in edges.items()}

        def seconds(ring: tuple[str, ...], bytes_: int) -> float:
            part, steps = bytes_ / len(ring), len(ring) - 1
            return steps * max(latency_s + part / width for latency_s, width in of_ring[ring])

        rows = zip(rings, held, strict=True)
        return [{name: seconds(ring, size) for name, size in row.items()} for ring, row in rows]

    def layer_seconds(self, layer: Layer, type_name: str) -> Seconds:
        """Return the seconds of one layer, with its forward again where it is recomputed."""
        forward, inputs, weights, whole = self.problem.seconds(layer, type_name)
        again = self.problem.loaded(layer, type_name)[0] if layer.name in self._rerun else 0.0
        return forward, inputs + again, weights, whole + again

    def gather_s(self, bytes_: int, device: str) -> float:
        """Return the seconds in which a group makes whole tensors of the parts that it received."""
        group = self._plan.cluster.device_type(device).group
        if group is None or not bytes_:
            return 0.0
        ways = group.collectives["all_gather"]
        return min(way.latency_us / 1e6 + bytes_ / (way.gb_per_s * 1e9) for way in ways)

    def message(self, bytes_: int, source: str, target: str) -> Path | None:
        """The path of a message; None if nothing need be sent."""
        return self.routes.path(source, target) if bytes_ and source != target else None

    @cached_property
    def reductions(self) -> list[Reduction]:
        """Stages by themselves in order, then tied parameters by the stages that hold them."""
        bytes_: defaultdict[tuple[int, ...], int] = defaultdict(int)
        holders: defaultdict[str, set[int]] = defaultdict(set)
        for layer in self._graph.layers:
            for name in layer.parameters:
                holders[name].add(self._stage_of[layer.name])
        for name, stages in holders.items():
            if self._parameters[name].trainable and name not in self._divided:
                bytes_[tuple(sorted(stages))] += self._parameters[name].bytes
                for stage in stages if self._in_turn(stages) else ():
                    bytes_[(stage,)] += self._parameters[name].bytes
        rows: list[Reduction] = []
        for members in sorted(bytes_, key=lambda stages: (len(stages) > 1, stages)):
            if self._in_turn(members):
                rows += self._among_stages(members, bytes_[members])
                continue
            there = self._devices_of(members)
            devices = tuple(name for name in self._plan.cluster.device_names if name in there)
            if len(devices) > 1 and bytes_[members]:
                rows += self._reductions(members, devices, bytes_[members], holders)
        return rows

    def _reductions(
        self,
        members: tuple[int, ...],
        devices: tuple[str, ...],
        bytes_: int,
        holders: dict[str, set[int]],
    ) -> Iterator[Reduction]:
        """One reduction, or one for each bucket if buckets are reduced during backwards."""
        limit = self._plan.bucket_bytes
        way = self.routes.ring_half if self.shares_state else self.routes.all_reduce
        if limit is None or len(members) > 1:
            yield Reduction(members, devices, way(devices, bytes_))
            return
        held, first = 0, ""
        for name, layer in self._gradients_made(members[0], holders):
            more = self._parameters[name].bytes
            if first and held + more > limit:
                yield Reduction(members, devices, way(devices, held), first)
                held = 0
            held, first = held + more, layer
        yield Reduction(members, devices, way(devices, held), first)

    def _in_turn(self, stages: Iterable[int]) -> bool:
        """Whether replicas of each of several stages reduce a gradient before these stages do."""
        counts = [len(self._plan.stages[stage].devices) for stage in stages]
        return self._plan.runtime.tied == "in_turn" and len(counts) > 1 and len(set(counts)) == 1

    def _among_stages(self, members: tuple[int, ...], bytes_: int) -> Iterator[Reduction]:
        """One all-reduce for the n-th replica of all of these stages."""
        for number in range(len(self._plan.stages[members[0]].devices)):
            there = {self._plan.stages[stage].devices[number] for stage in members}
            devices = tuple(name for name in self._plan.cluster.device_names if name in there)
            if len(devices) > 1 and bytes_:
                taken = self.routes.all_reduce(devices, bytes_)
                yield Reduction(members, devices, taken, gathers=False)

    def _devices_of(self, stages: Iterable[int]) -> set[str]:
        return {device for index in stages for device in self._plan.stages[index].devices}

    @cached_property
    def _sharers(self) -> dict[str, int]:
        """How many devices share the optimizer's state of each parameter; none: nobody does."""
        holders: defaultdict[str, set[int]] = defaultdict(set)
        for layer in self._graph.layers if self.shares_state else ():
            for name in layer.parameters:
                holders[name].add(self._stage_of[layer.name])
        return {
            name: len(self._devices_of([min(stages)] if self._in_turn(stages) else stages))
            for name, stages in holders.items()
        }

    def _gradients_made(
        self, stage: int, holders: dict[str, set[int]]
    ) -> Iterator[tuple[str, str]]:
        """A stage's own gradients as a backward completes them, with the first user of each."""
        found: dict[str, str] = {}
        for layer in self.layers(stage):
            for name in layer.parameters:
                parameter = self._parameters[name]
                if not parameter.trainable or name in self._divided:
                    continue
                is_own = len(holders[name]) == 1 or self._in_turn(holders[name])
                if parameter.bytes and is_own:
                    found.setdefault(name, layer.name)
        yield from reversed(found.items())

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of the step; a parameter that several stages hold counts once."""
        layers = [layer for stage in self.stages_on[device] for layer in self.layers(stage)]
        held = [parameter for parameter in self._held(layers) if parameter.trainable]
        moved = sum(
            (3 * row.bytes + 2 * self.problem.state_bytes(row)) / self._sharers.get(row.name, 1)
            for row in held
        )
        kind = self._plan.cluster.device_type(device)
        step_s = moved / (kind.memory_bandwidth_gb_per_s * kind.optimizer_efficiency * 1e9)
        return step_s + _summed_s(held, kind)

    def _held(self, layers: Iterable[Layer]) -> list[Parameter]:
        names = dict.fromkeys(name for layer in layers for name in layer.parameters)
        return [self._parameters[name] for name in names]

    def copy_s(self, stage: int, device: str) -> float:
        """Return the seconds in which what a stage offloads passes a device's host link."""
        rate = self._plan.cluster.device_type(device).host_link_gb_per_s
        return self.bytes[stage].offloaded / (rate * 1e9) if rate else math.inf

    # --- bytes ------------------------------------------------------------------------------------

    def capacity_bytes(self, device: str) -> int:
        """Return the bytes that a plan may use."""
        return self.problem.capacity_bytes(self._plan.cluster.type_of(device))

    def constant_bytes(self, device: str) -> int:
        """Held at all times: the largest workspace, and of static memory what is always there."""
        rows = [self.bytes[stage] for stage in self.stages_on[device]]
        static = sum(row.static - row.gradients for row in rows)
        return static + max(row.workspace for row in rows)

    def split_bytes(self, stage: int, device: str) -> int:
        """Held on top of that while an input gradient of the stage runs apart."""
        counted = max(self.bytes[other].workspace for other in self.stages_on[device])
        return max(0, self.bytes[stage].split_workspace - counted)

    def _stage_bytes(self, stage: Stage) -> CheckedStageBytes:
        index, layers = stage.index, self.layers(stage.index)
        received, sent = self._crossing(index, index), self._crossing(index + 1, index)
        # As many bytes are sent as the other side holds of them.
        onwards = self._crossing(index + 1, min(index + 1, len(self._graphs) - 1))
        back = self._crossing(index, max(index - 1, 0))
        # What a layer that does not run again keeps of the received tensors is in its stash.
        in_stash = sum(t.bytes for t in received if self._keeper(t) == index)
        input_bytes = sum(t.bytes for t in received)
        workspace, split_workspace = self._workspaces(layers, self.in_parts(index))
        made = self._first_gradients(stage, layers)
        while_made = self._while_made(layers, made, workspace)
        return CheckedStageBytes(
            static=sum(
                self.problem.static_bytes(
                    row, self._sharers.get(row.name, 1), in_parts=row.name in self._divided
                )
                for row in self._held(layers)
            ),
            workspace=workspace,
            split_workspace=max(workspace, split_workspace),
            stash=self._kept_bytes(index, layers) + input_bytes - in_stash,
            weight_stash=sum(map(_late_bytes, layers)) + input_bytes - in_stash,
            received=input_bytes,
            sent=sum(t.bytes for t in sent),
            gradient_sent=sum(t.bytes for t in received if t.requires_grad),
            gradient_received=sum(t.bytes for t in sent if t.requires_grad),
            message=sum(map(moved_bytes, onwards)),
            gradient_message=sum(moved_bytes(t) for t in back if t.requires_grad),
            gathered=sum(moved_bytes(t) for t in sent if t.parts > 1),
            gradient_gathered=sum(
                moved_bytes(t) for t in received if t.requires_grad and t.parts > 1
            ),
            offloaded=self._offloaded_bytes(stage),
            gradients=sum(made),
            first_backward=while_made[0],
            first_weights=while_made[1],
        )

    def _first_gradients(self, stage: Stage, layers: Sequence[Layer]) -> list[int]:
        """Bytes of gradients that the first backward through each layer makes.

        Where several devices reduce a gradient, or the runtime keeps it, it has a place at all
        times. So it has where a backward takes no time, or none follows the first.
        """
        plan, nothing = self._plan, [0 for _ in layers]
        if plan.runtime.gradients == "always" or plan.microbatches == 1:
            return nothing
        if len(stage.devices) > 1 or plan.sync.strategy not in ("all_reduce", "fused"):
            return nothing
        device = stage.devices[0]
        if not self.seconds(stage.index, "B", device) or not self.seconds(stage.index, "I", device):
            return nothing
        there = {row.name for row in layers}
        others = {
            name for row in self._graph.layers if row.name not in there for name in row.parameters
        }
        seen: set[str] = set()
        made = []
        for layer in reversed(layers):
            new = set(layer.parameters) - seen
            seen |= new
            rows = [self._parameters[name] for name in new - others]
            made.append(sum(row.bytes for row in rows if row.trainable))
        return made[::-1]

    def _while_made(
        self, layers: Sequence[Layer], made: Sequence[int], workspace: int
    ) -> tuple[int, int]:
        """What a first backward holds beside whole stashes, and a first weight gradient."""
        if not sum(made):
            return 0, 0
        whole = apart = 0
        for k, layer in enumerate(layers):
            there = sum(made[k:])
            kept = sum(map(self._kept_of, layers[k:]))
            whole = max(whole, self._peak_bytes(layer) + there - kept)
            sizes = (row.bytes for row in self._held([layer]) if row.trainable)
            copied = min(made[k], max(sizes, default=0))
            apart = max(apart, there + copied - sum(map(_late_bytes, layers[k + 1 :])))
        most = workspace + sum(made)
        return min(whole, most), min(apart, most)

    def _kept_of(self, layer: Layer) -> int:
        is_again = layer.name in self._rerun
        return self._saved_input_bytes(layer) if is_again else layer.stash_bytes

    def _offloaded_bytes(self, stage: Stage) -> int:
        """Stashes of layers, less what others hold anyway until the backward.

        That is the batch, and tensors that the rest of the stage or the one before has too.
        """
        away = set(stage.offload)
        staying = 0
        for tensor in self._graph.boundaries:
            holders = {tensor.producer, *tensor.users}
            stay = {name for name in holders - away if self._stage_of[name] == stage.index}
            if tensor.saved_by in away and (stay or self._stage_of[tensor.producer] < stage.index):
                staying += tensor.bytes
        rows = (row for row in self._graph.layers if row.name in away)
        kept = sum(max(0, row.stash_bytes - row.batch_bytes) for row in rows)
        return max(0, kept - staying)

    def _crossing(self, cut: int, stage: int) -> list[Boundary]:
        """Tensors made before a cut and used behind it, with the bytes that a stage has of them."""
        return [
            tensor
            for tensor in self._graphs[stage].boundaries
            if self._stage_of[tensor.producer] < cut
            and any(self._stage_of[user] >= cut for user in tensor.users)
        ]

    def _keeper(self, tensor: Boundary) -> int | None:
        """The stage that keeps a tensor in the stash of a layer that does not run again."""
        if tensor.saved_by is None or tensor.saved_by in self._rerun:
            return None
        return self._stage_of[tensor.saved_by]

    def _kept_bytes(self, stage: int, layers: Sequence[Layer]) -> int:
        """The stashes of layers, and tensors of the stage's own that layers start again from."""
        rerun = [row.name for row in layers if row.name in self._rerun]
        again = {tensor.name: tensor for name in rerun for tensor in self._used[name]}
        own = [
            tensor.bytes
            for tensor in again.values()
            if self._stage_of[tensor.producer] == stage and self._keeper(tensor) != stage
        ]
        return sum(row.stash_bytes for row in layers if row.name not in self._rerun) + sum(own)

    def _workspaces(self, layers: Sequence[Layer], in_parts: Mapping[str, int]) -> tuple[int, int]:
        """While whole backwards run, and while an input gradient runs apart.

        A layer's weights that are put together are whole while it runs, and its gradients too.
        """
        peaks = [self._peak_bytes(row) + 2 * in_parts.get(row.name, 0) for row in layers]
        kept = [self._kept_of(row) for row in layers]
        late = [_late_bytes(layer) for layer in layers]
        # The weight gradients' needs are all there before the input gradient ends.
        whole, split = 0, sum(late) - sum(kept)
        for k, peak in enumerate(peaks):
            later = peak - sum(kept[k:])
            whole = max(whole, later)
            split = max(split, later + max(0, late[k] - kept[k]) + sum(late[k + 1 :]))
        return whole, split

    def _saved_input_bytes(self, layer: Layer) -> int:
        used = {tensor.name: tensor for tensor in self._used[layer.name]}
        return sum(tensor.bytes for tensor in used.values() if tensor.saved_by == layer.name)

    def _peak_bytes(self, layer: Layer) -> int:
        if layer.peak_bytes is not None:
            return layer.peak_bytes
        made = sum(2 * tensor.bytes for tensor in self._made[layer.name])
        sent_back = sum(t.bytes for t in self._used[layer.name] if t.requires_grad)
        gradients = [row.bytes for row in self._held([layer]) if row.trainable]
        kept = layer.stash_bytes + layer.again_bytes
        return kept + made + sent_back + max(gradients, default=0)


def _late_bytes(layer: Layer) -> int:
    """What the weight gradient needs once the input gradient is done."""
    return layer.stash_bytes if layer.weight_stash_bytes is None else layer.weight_stash_bytes
