"""Seconds and bytes of single layers and parameters by the formulas of docs/cost_model.md."""

from __future__ import annotations

from math import ceil, floor

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType, TileShape
from planner.job import Job
from planner.model.figures import PHASES, CollectiveKind, Work
from planner.model.graph_record import Boundary, Layer, Parameter
from planner.model.length_graph import layer_at

_MOMENT_BYTES = {"adamw": 8, "sgd_momentum": 4, "sgd": 0}
"""Bytes of the moments of one element in float32."""
Seconds = tuple[float, ...]
"""Seconds of the operations F, I, W and B."""


class ProblemCosts:
    """Times and sizes of single layers and parameters, whatever the stages.

    Args:
        cluster: whose device types count.
        job: whose precision and optimizer count.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._types, self._job = cluster.device_types, job

    # --- seconds ----------------------------------------------------------------------------------

    def seconds(self, layer: Layer, type_name: str, *, loading: bool = True) -> Seconds:
        """Return the seconds of F, I, W and B of one layer that is not recomputed.

        Args:
            layer: which.
            type_name: of the device.
            loading: whether its forward waits for the data loader.
        """
        if layer.lengths:
            rows = [
                self.seconds(layer_at(layer, row), type_name, loading=loading)
                for row in layer.lengths
            ]
            return tuple(np.dot([row.share for row in layer.lengths], rows).tolist())
        device, measured = self._types[type_name], layer.measured.get(type_name)
        if measured is None:
            forward, inputs, weights = (self._phase_s(layer, phase, device) for phase in PHASES)
            whole = inputs + weights
        else:
            forward, inputs = measured.forward_s, measured.input_gradient_s
            weights, said = measured.weight_gradient_s, measured.backward_s
            whole = inputs + weights if said is None else said
        exchanged = dict.fromkeys(PHASES, 0.0)
        for row in layer.collectives:
            exchanged[row.phase] += collective_s(device, row.kind, row.bytes)
        first, second, third = exchanged.values()
        rate = device.loader_gb_per_s if loading else None
        waited_s = layer.batch_bytes / (rate * 1e9) if rate else 0.0
        return waited_s + forward + first, inputs + second, weights + third, whole + second + third

    def _phase_s(self, layer: Layer, phase: str, device: DeviceType) -> float:
        """Seconds of a phase: the roofline, of each row of work where a layer says them."""
        copied_s = 0.0
        if phase == "forward" and device.host_link_gb_per_s is not None:
            copied_s = layer.batch_bytes / (device.host_link_gb_per_s * 1e9)
        if layer.work:
            rows = (row for row in layer.work if row.phase == phase)
            return copied_s + sum(self._work_s(row, layer, device) for row in rows)
        peak = device.peak_tflop_per_s[self._job.precision] * 1e12 * device.efficiency
        rate = device.memory_bandwidth_gb_per_s * 1e9 * device.bandwidth_efficiency
        flops, traffic = getattr(layer, f"{phase}_flops"), getattr(layer, f"{phase}_traffic_bytes")
        return copied_s + float(max(flops / peak, traffic / rate))

    def _work_s(self, work: Work, layer: Layer, device: DeviceType) -> float:
        name, flops = work.operation_class, float(work.flops)
        precision: str = self._job.precision
        if name == "causal_attention":  # Fused kernels skip what the mask leaves out.
            name, flops = "attention", flops / 2
        if name == "product" and device.tiles is not None and layer.products:
            flops *= _padding(layer, work.phase, device.tiles)
        if name == "convolution" and precision == "float32":
            precision = "tf32" if "tf32" in device.peak_tflop_per_s else precision
        figures = {
            field: getattr(device, field)
            for field in ("efficiency", "bandwidth_efficiency", "ramp_up_us")
        }
        if name in device.by_class:
            figures |= device.by_class[name].model_dump(exclude_none=True)
        peak = device.peak_tflop_per_s[precision] * 1e12 * figures["efficiency"]
        rate = device.memory_bandwidth_gb_per_s * 1e9 * figures["bandwidth_efficiency"]
        ramp_up_s = work.operations * figures["ramp_up_us"] * 1e-6 if flops else 0.0
        overhead_s = work.operations * device.operation_overhead_us * 1e-6
        return float(max(flops / peak + ramp_up_s, work.traffic_bytes / rate) + overhead_s)

    # --- bytes ------------------------------------------------------------------------------------

    def capacity_bytes(self, type_name: str) -> int:
        """Return the bytes that a plan may use of a device."""
        kind = self._types[type_name]
        return int((kind.memory_gib - kind.reserved_gib) * 2**30)

    def state_bytes(self, elements: int) -> int:
        """Return the bytes of the optimizer's state of so many elements, with 32-bit masters."""
        precision, moments = self._job.precision, _MOMENT_BYTES[self._job.optimizer]
        masters = 4 if precision in ("float16", "bfloat16") else 0
        return (moments * (2 if precision == "float64" else 1) + masters) * elements

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
        both = parameter.bytes + self.state_bytes(parameter.elements)
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
        parts = sharers if in_parts else 1
        held = ceil(parameter.bytes / parts) + ceil(self.gradient_bytes(parameter) / parts)
        return held + self.state_bytes(ceil(parameter.elements / sharers))


def moved_bytes(tensor: Boundary) -> int:
    """Return what a message of a tensor has, of several lengths in the mean, rounded down.

    Of what is sent in parts all devices of a group together send one whole tensor.
    """
    if not tensor.lengths:
        return tensor.bytes // tensor.parts
    return floor(sum(row.bytes * row.share for row in tensor.lengths))


def _padding(layer: Layer, phase: str, tiles: TileShape) -> float:
    """Return how many times a layer's FLOPs its products take that fill whole waves of tiles."""
    done = filled = 0
    for row in layer.products:
        high, wide, inner = {
            "forward": (row.rows, row.columns, row.inner),
            "input_gradient": (row.rows, row.inner, row.columns),
            "weight_gradient": (row.inner, row.columns, row.rows),
        }[phase]
        count = row.batch * ceil(high / tiles.rows) * ceil(wide / tiles.columns)
        waves = ceil(count / tiles.at_once)
        done += row.batch * high * wide * inner
        filled += waves * tiles.at_once * tiles.rows * tiles.columns * inner
    return filled / done


def collective_s(device: DeviceType, kind: CollectiveKind, bytes_: int) -> float:
    """Return the seconds of a collective inside a tensor-parallel group, by its best algorithm."""
    if device.group is None or not bytes_:
        return 0.0
    ways = device.group.collectives[kind]
    return min(way.latency_us / 1e6 + bytes_ / (way.gb_per_s * 1e9) for way in ways)
