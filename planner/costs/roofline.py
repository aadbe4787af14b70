"""Seconds of one layer on one device type: measured times if known, else the roofline model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.cluster.hardware import TF32, DeviceType, TileShape
from planner.model.figures import (
    PHASES,
    EfficiencyClass,
    OperationClass,
    Phase,
    Product,
    Work,
)
from planner.model.graph_record import Layer
from planner.model.length_graph import layer_at

ROUNDING = 1e-9
"""Smaller relative differences of times are rounding."""
CLASS_OF: Mapping[OperationClass, EfficiencyClass] = {
    "product": "product",
    "convolution": "convolution",
    "attention": "attention",
    "causal_attention": "attention",
    "memory": "memory",
}
EXECUTED: Mapping[OperationClass, float] = {"causal_attention": 0.5}
"""Fraction of the counted FLOPs that is computed: fused kernels skip what a causal mask removes
(Dao 2023, "FlashAttention-2", section 3.1)."""


KINDS = "BFIW"
"""The kinds of operations as they are numbered: 0 to 3, as their letters sort."""


class OperationTimes(NamedTuple):
    """Seconds of the operations of one microbatch.

    ``backward_s`` is the whole backward, which may take less time than its split parts together.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    backward_s: float

    @property
    def is_quicker_whole(self) -> bool:
        """Whether a whole backward takes less time than its split parts."""
        split_s = self.input_gradient_s + self.weight_gradient_s
        return self.backward_s < split_s * (1 - ROUNDING)

    def seconds(self, kind: str) -> float:
        """Return the seconds of an operation by kind: F, B, I or W."""
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
    """Return the seconds of a layer for one microbatch.

    Measured times are used if there are any, else the sum of :func:`work_s` over the layer's work
    and of the copy of what a forward reads of the batch; both with the layer's collectives inside a
    tensor-parallel group, which nothing hides and which measured times are without. A
    recomputed layer runs its forward again in its backward. The wait for the loader is in the
    forward alone: no profile has it, and what was loaded is still there. Of microbatches of several
    lengths it is the mean.
    """
    if layer.lengths:
        return _mean(
            layer,
            [
                layer_times(layer_at(layer, row), type_name, device, precision, recompute)
                for row in layer.lengths
            ],
        )
    times = loaded_times(layer, type_name, device, precision)
    loaded_s = times.forward_s + device.load_s(layer.batch_bytes)
    if not recompute:
        return times._replace(forward_s=loaded_s)
    return times._replace(
        forward_s=loaded_s,
        input_gradient_s=times.input_gradient_s + times.forward_s,
        backward_s=times.backward_s + times.forward_s,
    )


def loaded_times(
    layer: Layer, type_name: str, device: DeviceType, precision: str
) -> OperationTimes:
    """Return the seconds of a layer that is not recomputed where the batch need not be waited for.

    Its forward is what recomputing the layer adds to its backward.
    """
    times = computed_times(layer, type_name, device, precision)
    if device.group is None or not layer.collectives:
        return times
    return times + collective_times(layer, device)


def computed_times(
    layer: Layer, type_name: str, device: DeviceType, precision: str
) -> OperationTimes:
    """Return the same without collectives inside a tensor-parallel group."""
    if layer.lengths:
        rows = (layer_at(layer, row) for row in layer.lengths)
        return _mean(layer, [computed_times(row, type_name, device, precision) for row in rows])
    measured = layer.measured.get(type_name)
    if measured is None:
        return _roofline(layer, device, precision)
    return OperationTimes(
        measured.forward_s,
        measured.input_gradient_s,
        measured.weight_gradient_s,
        measured.whole_backward_s,
    )


def collective_times(layer: Layer, device: DeviceType) -> OperationTimes:
    """Return the seconds of a layer's collectives inside a tensor-parallel group, without reruns.

    Args:
        layer: as a group has it.
        device: the type of the group; of a single device there are none.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    if device.group is not None:
        for row in layer.collectives:
            seconds[row.phase] += device.group.seconds(row.kind, row.bytes)
    forward_s, input_s, weight_s = (seconds[phase] for phase in PHASES)
    return OperationTimes(forward_s, input_s, weight_s, input_s + weight_s)


def _mean(layer: Layer, times: Sequence[OperationTimes]) -> OperationTimes:
    """Return the mean over a layer's lengths, by their shares."""
    shares = [row.share for row in layer.lengths]
    return OperationTimes(
        *(
            sum(share * seconds for share, seconds in zip(shares, column, strict=True))
            for column in zip(*times, strict=True)
        )
    )


def work_s(
    work: Work, device: DeviceType, precision: str, products: Sequence[Product] = ()
) -> float:
    """Return the seconds of equal operations, one after the other.

    Roofline (Williams, Waterman, Patterson 2009): each operation takes the larger of arithmetic
    over reachable throughput and traffic over reachable memory bandwidth, plus the overhead of
    starting it. Arithmetic takes ``ramp_up_us`` longer than at full speed, so that throughput falls
    off for small products as in Hockney's model (Hockney and Jesshope 1981): those that would take
    the ramp-up run at half speed. Of class product, arithmetic takes as much longer as the layer's
    products leave parts of the device's tiles and waves empty. No term falls as FLOPs or bytes
    grow.

    Args:
        work: of one phase of a layer.
        device: that runs it.
        precision: of the job.
        products: of the layer; empty: of no known shape.
    """
    reached = reach(device, CLASS_OF[work.operation_class])
    arithmetic_s = 0.0
    if work.flops:
        flops = work.flops * EXECUTED.get(work.operation_class, 1.0)
        if work.operation_class == "product" and device.tiles is not None:
            flops *= padding(device.tiles, work.phase, products)
        peak = _peak_tflop_per_s(device, work.operation_class, precision) * 1e12
        arithmetic_s = (
            flops / (peak * reached.efficiency) + work.operations * reached.ramp_up_us * 1e-6
        )
    bytes_per_s = device.memory_bandwidth_gb_per_s * 1e9 * reached.bandwidth_efficiency
    overhead_s = work.operations * device.operation_overhead_us * 1e-6
    return max(arithmetic_s, work.traffic_bytes / bytes_per_s) + overhead_s


def padding(tiles: TileShape, phase: Phase, products: Sequence[Product]) -> float:
    """Return how many times as much a device computes as products have, in a phase.

    Args:
        tiles: of the device.
        phase: of the layer.
        products: of its forward; 1 without any.
    """
    flops = sum(product.flops() for product in products)
    if not flops:
        return 1.0
    padded = sum(
        product.flops() / tiles.fill(product.batch, *product.result(phase)) for product in products
    )
    return padded / flops


class Reach(NamedTuple):
    """Reachable throughput, bandwidth and overheads of a class of operations."""

    efficiency: float
    bandwidth_efficiency: float
    ramp_up_us: float


def reach(device: DeviceType, of: EfficiencyClass) -> Reach:
    """Return the figures of a class if the device type has them, else the device's own."""
    class_efficiency = device.by_class.get(of)

    def figure(name: str) -> float:
        own = None if class_efficiency is None else getattr(class_efficiency, name)
        return float(getattr(device, name) if own is None else own)

    return Reach(*(figure(name) for name in Reach._fields))


def _peak_tflop_per_s(device: DeviceType, of: str, precision: str) -> float:
    if precision == "float32" and of == "convolution" and TF32 in device.peak_tflop_per_s:
        return device.peak_tflop_per_s[TF32]
    return device.peak_tflop_per_s[precision]


def _roofline(layer: Layer, device: DeviceType, precision: str) -> OperationTimes:
    if layer.work:
        forward_s, input_s, weight_s = (
            sum(
                work_s(row, device, precision, layer.products)
                for row in layer.work
                if row.phase == phase
            )
            for phase in PHASES
        )
    else:
        forward_s, input_s, weight_s = (
            _undivided_s(layer, phase, device, precision) for phase in PHASES
        )
    forward_s += device.copy_s(layer.batch_bytes)
    return OperationTimes(forward_s, input_s, weight_s, input_s + weight_s)


def _undivided_s(layer: Layer, phase: Phase, device: DeviceType, precision: str) -> float:
    """Return the seconds of a phase without rows of work: those of one operation of any class."""
    flop_per_s = device.peak_tflop_per_s[precision] * 1e12 * device.efficiency
    bytes_per_s = device.memory_bandwidth_gb_per_s * 1e9 * device.bandwidth_efficiency
    flops = getattr(layer, f"{phase}_flops")
    return float(max(flops / flop_per_s, getattr(layer, f"{phase}_traffic_bytes") / bytes_per_s))
