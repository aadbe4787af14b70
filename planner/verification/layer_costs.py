"""Seconds and bytes of single layers by the formulas of docs/cost_model.md, whatever the stages."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor
from operator import mul

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType, TileShape
from planner.job import Job
from planner.model.figures import PHASES, CollectiveKind, Work
from planner.model.graph_record import Boundary, Layer, Parameter

_STATE_BYTES = {"adamw": 8, "sgd_momentum": 4, "sgd": 0}
"""Bytes of the moments of one element in float32."""
_FIGURES_OF_CLASS = ("efficiency", "bandwidth_efficiency", "ramp_up_us")
_TOTALS = tuple(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes"))
Seconds = tuple[float, ...]
"""Seconds of the operations F, I, W and B."""


class ProblemCosts:
    """Times and sizes of single layers and parameters, whatever the stages.

    Args:
        cluster: whose device types count.
        job: whose precision and optimizer count.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster, self._job = cluster, job

    def seconds(self, layer: Layer, type_name: str, *, loading: bool = True) -> Seconds:
        """Return the seconds of one layer that is not recomputed.

        Args:
            layer: which.
            type_name: of the device.
            loading: whether it waits for its batch; it does not where the batch is there.
        """
        if layer.lengths:
            rows = [self.seconds(row, type_name, loading=loading) for row in at_lengths(layer)]
            shares = [row.share for row in layer.lengths]
            return tuple(sum(map(mul, shares, column)) for column in zip(*rows, strict=True))
        measured, device = layer.measured.get(type_name), self._cluster.device_types[type_name]
        if measured is not None:
            forward, inputs = measured.forward_s, measured.input_gradient_s
            weights, whole = measured.weight_gradient_s, measured.backward_s
        else:
            whole = None
            forward, inputs, weights = (self.roofline(layer, phase, device)[0] for phase in PHASES)
        sent = [exchanging_s(layer, phase, device) for phase in PHASES]
        backward = inputs + weights if whole is None else whole
        rate = device.loader_gb_per_s if loading else None
        waited = 0.0 if rate is None else layer.batch_bytes / (rate * 1e9)
        exchanged = forward + sent[0], inputs + sent[1], weights + sent[2]
        return exchanged[0] + waited, *exchanged[1:], backward + sent[1] + sent[2]

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

    def gradient_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of a parameter's gradient, that of 16-bit weights usually in float32."""
        is_wide = parameter.bytes > 2 * parameter.elements
        if is_wide or self._job.gradient_precision == "weights":
            return parameter.bytes
        return parameter.elements * 4

    def least_reduced_bytes(self, parameter: Parameter) -> float:
        """Return bytes whose all-reduce takes no longer than what is done with a parameter.

        Where devices share the optimizer's state, the gradient goes around a ring once, and the
        parameter once: half a ring of all-reduces each.
        """
        bytes_ = self.gradient_bytes(parameter)
        return (bytes_ + parameter.bytes) / 2 if self._job.shards_state else bytes_

    def stepped_bytes(self, parameter: Parameter) -> int:
        """Return what an optimizer step moves: gradients once, weights and state twice."""
        both = parameter.bytes + self.state_bytes(parameter)
        return self.gradient_bytes(parameter) + 2 * both

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
        elements = ceil(parameter.elements / sharers)
        part = parameter.model_copy(update={"elements": elements})
        held = [parameter.bytes, self.gradient_bytes(parameter)]
        if in_parts:
            held = [ceil(bytes_ / sharers) for bytes_ in held]
        return sum(held) + self.state_bytes(part)


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


def moved_bytes(tensor: Boundary) -> int:
    """Return what a message of a tensor has, of several lengths in the mean, rounded down.

    Of what is sent in parts all devices of a group together send one whole tensor.
    """
    if not tensor.lengths:
        return tensor.bytes // tensor.parts
    return floor(sum(row.bytes * row.share for row in tensor.lengths))


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


def collective_s(device: DeviceType, kind: CollectiveKind, bytes_: int) -> float:
    """Return the seconds of a collective inside a tensor-parallel group, by its best algorithm."""
    if device.group is None or not bytes_:
        return 0.0
    ways = device.group.collectives[kind]
    return min(way.latency_us / 1e6 + bytes_ / (way.gb_per_s * 1e9) for way in ways)


def exchanging_s(layer: Layer, phase: str, device: DeviceType) -> float:
    """Return the seconds of a phase's collectives inside a tensor-parallel group."""
    rows = (row for row in layer.collectives if row.phase == phase)
    return sum(collective_s(device, row.kind, row.bytes) for row in rows)


def summed_s(costs: ProblemCosts, parameters: Iterable[Parameter], kind: DeviceType) -> float:
    """Return the seconds in which a group sums gradients of what each of its devices has whole."""
    summed = sum(costs.gradient_bytes(row) for row in parameters if row.summed)
    return collective_s(kind, "all_reduce", summed // kind.members)
