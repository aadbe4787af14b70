"""Seconds of one layer on one device type: measured where it was, else by the roofline model."""

from typing import NamedTuple

from planner.artifacts.hardware import DeviceType
from planner.artifacts.layer_graph import Layer

ROUNDING = 1e-9
"""A smaller share of a time is rounding."""


class OperationTimes(NamedTuple):
    """Seconds of the operations of one microbatch.

    ``backward_s`` is of the whole backward, which may take less time than both gradients apart.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float

    @property
    def is_quicker_whole(self) -> bool:
        """Whether a whole backward takes less time than its halves."""
        apart_s = self.input_gradient_s + self.weight_gradient_s
        return self.backward_s < apart_s * (1 - ROUNDING)

    def seconds(self, kind: str) -> float:
        """By operation kind: F, B, I or W."""
        match kind:
            case "F":
                return self.forward_s
            case "B":
                return self.backward_s
            case "I":
                return self.input_gradient_s
            case "W":
                return self.weight_gradient_s
        raise ValueError(f"unknown operation kind {kind!r}")

    def __add__(self, other: object) -> "OperationTimes":
        assert isinstance(other, OperationTimes)
        return OperationTimes(*(a + b for a, b in zip(self, other, strict=True)))


def layer_times(
    layer: Layer, type_name: str, device: DeviceType, precision: str, recompute: bool = False
) -> OperationTimes:
    """Seconds of a layer for one microbatch.

    Roofline (Williams, Waterman, Patterson 2009): the larger of FLOPs over reachable throughput
    and traffic over memory bandwidth. Recomputing a layer runs its forward again in its backward.
    """
    measured = layer.measured.get(type_name)
    if measured is not None:
        times = OperationTimes(
            measured.forward_s,
            measured.input_gradient_s,
            measured.weight_gradient_s,
            measured.whole_backward_s,
        )
    else:
        times = _roofline(layer, device, precision)
    if not recompute:
        return times
    return times._replace(
        input_gradient_s=times.input_gradient_s + times.forward_s,
        backward_s=times.backward_s + times.forward_s,
    )


def _roofline(layer: Layer, device: DeviceType, precision: str) -> OperationTimes:
    flop_per_s = device.peak_tflop_per_s[precision] * 1e12 * device.efficiency
    bytes_per_s = device.memory_bandwidth_gb_per_s * 1e9

    def seconds(flops: int, traffic: int) -> float:
        return max(flops / flop_per_s, traffic / bytes_per_s)

    input_s = seconds(layer.input_gradient_flops, layer.input_gradient_traffic_bytes)
    weight_s = seconds(layer.weight_gradient_flops, layer.weight_gradient_traffic_bytes)
    return OperationTimes(
        forward_s=seconds(layer.forward_flops, layer.forward_traffic_bytes),
        input_gradient_s=input_s,
        weight_gradient_s=weight_s,
        backward_s=input_s + weight_s,
    )
