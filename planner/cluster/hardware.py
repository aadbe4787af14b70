"""Figures of one type of device and of one type of link."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.model.figures import CollectiveKind, EfficiencyClass
from planner.records.document import Record
from planner.units import plural

GIB = 2**30
# Far beyond any machine, and near enough for every product and quotient of figures to be finite.
LEAST, MOST = 1e-9, 1e15
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegative = Annotated[float, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=LEAST, le=1)]
Factor = Annotated[float, Field(ge=1, le=MOST)]
"""How many times as long something takes."""
Price = Annotated[float, Field(ge=0, le=MOST)]
"""Price per hour in the cluster's currency."""
Source = Literal["measured", "datasheet", "assumed"]
"""Source of figures."""
TF32 = "tf32"
"""The key of ``peak_tflop_per_s`` for float32 convolutions, which use TF32 by torch's defaults."""


class ClassEfficiency(Record):
    """Figures of one class of operations, where they differ from the other classes.

    The fields are those of :class:`DeviceType`, whose values apply to fields without a value here.

    Attributes:
        efficiency: Fraction of peak throughput.
        bandwidth_efficiency: Fraction of memory bandwidth.
        ramp_up_us: Extra time of each product.
    """

    efficiency: Share | None = None
    bandwidth_efficiency: Positive | None = None
    ramp_up_us: NonNegative | None = None

    @model_serializer(mode="wrap")
    def _without_missing_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class TileShape(Record):
    """The parts in which a GPU computes matrix products, and how many at a time.

    A product takes as long as one whose result fills whole tiles, and these whole waves of all
    multiprocessors (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave
    quantization).

    Attributes:
        rows: Rows of a tile.
        columns: Columns of a tile.
        at_once: Tiles that the device computes at a time: its multiprocessors.
    """

    rows: Annotated[int, Field(ge=1)]
    columns: Annotated[int, Field(ge=1)]
    at_once: Annotated[int, Field(ge=1)]

    def fill(self, batch: int, rows: int, columns: int) -> float:
        """Return the fraction of the computed elements that is part of a product's result.

        Args:
            batch: number of equal products.
            rows: of the result of each.
            columns: of the result of each.
        """
        tiles = batch * -(-rows // self.rows) * -(-columns // self.columns)
        waves = -(-tiles // self.at_once)
        return batch * rows * columns / (waves * self.at_once * self.rows * self.columns)


class CollectiveFigures(Record):
    """One algorithm of a collective on given links.

    Attributes:
        latency_us: Time of all its steps without their bytes.
        gb_per_s: Bytes of the tensor that it moves, in 10^9 bytes/s.
    """

    latency_us: NonNegative
    gb_per_s: Positive


class GroupFigures(Record):
    """The inside of a tensor-parallel group, whose devices run every layer together.

    Attributes:
        devices: Number of its devices.
        collectives: Algorithms of each collective; the fastest for a tensor's size runs.
    """

    devices: Annotated[int, Field(ge=2)]
    collectives: dict[CollectiveKind, Annotated[tuple[CollectiveFigures, ...], Field(min_length=1)]]

    def seconds(self, collective: CollectiveKind, bytes_: int) -> float:
        """Return the time of a collective over a tensor that has this size on each device."""
        if not bytes_:
            return 0.0
        return min(
            row.latency_us * 1e-6 + bytes_ / (row.gb_per_s * 1e9)
            for row in self.collectives[collective]
        )


_LATER = (
    "bandwidth_efficiency",
    "ramp_up_us",
    "operation_overhead_us",
    "optimizer_efficiency",
    "host_link_gb_per_s",
    "compute_slowdown_while_communicating",
    "communication_slowdown_while_computing",
    "source",
    "hardware",
    "price_per_hour",
    "group",
    "tiles",
    "loader_gb_per_s",
)
"""Fields of device types that older clusters do not have, in the order in which they came."""


class DeviceType(Record):
    """One type of device.

    :mod:`planner.costs.roofline` computes times from the figures.

    Attributes:
        memory_gib: Memory of one device.
        memory_bandwidth_gb_per_s: Memory bandwidth, in 10^9 bytes/s.
        peak_tflop_per_s: Peak throughput by precision (float32, float16, bfloat16, float64), and
            ``tf32`` for float32 convolutions.
        efficiency: Fraction of peak throughput that operations reach.
        bandwidth_efficiency: Fraction of memory bandwidth that they reach; above 1 if a cache
            serves part of the counted traffic.
        ramp_up_us: Extra time of each matrix product, which matters for small products that do not
            fill the device.
        operation_overhead_us: Extra time of each operation.
        by_class: Figures per class of operation.
        optimizer_efficiency: Fraction of memory bandwidth that the optimizer's step reaches.
        host_link_gb_per_s: Bandwidth at which batches are copied from pinned memory of the host,
            in 10^9 bytes/s; null: nothing is copied, as on CPUs, or it is not known.
        loader_gb_per_s: Bandwidth at which its data loader hands over batches that training waits
            for, in 10^9 bytes/s; null: they are there in time, or it is not known.
        compute_slowdown_while_communicating: Factor on the time of computation while the device
            sends, receives or reduces; 1 where it is not known.
        communication_slowdown_while_computing: Factor on the time that the bytes of a message or
            reduction take while a device that sends, receives or reduces them computes; 1 where it
            is not known.
        reserved_gib: Memory used by driver and framework before the model.
        source: Source of the figures; with ``datasheet``, efficiencies and overheads still count as
            assumed.
        hardware: The processor or GPU that was measured, by the system's or the driver's name;
            profiles of another are refused.
        price_per_hour: Price of one device in the cluster's ``currency``; does not change plans.
        group: The inside of each device of this type if it is a tensor-parallel group, whose other
            figures are then those of all its devices together; null: it is a single device.
        tiles: The parts in which it computes matrix products, of single devices also in a group;
            null: the shape of a product does not matter, or nothing is known.
    """

    memory_gib: Positive
    memory_bandwidth_gb_per_s: Positive
    peak_tflop_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    efficiency: Share = 0.5
    bandwidth_efficiency: Positive = 1.0
    ramp_up_us: NonNegative = 0.0
    operation_overhead_us: NonNegative = 0.0
    by_class: dict[EfficiencyClass, ClassEfficiency] = Field(default_factory=dict)
    optimizer_efficiency: Positive = 1.0
    host_link_gb_per_s: Positive | None = None
    loader_gb_per_s: Positive | None = None
    compute_slowdown_while_communicating: Factor = 1.0
    communication_slowdown_while_computing: Factor = 1.0
    reserved_gib: NonNegative = 1.0
    source: Source = "datasheet"
    hardware: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    price_per_hour: Price | None = None
    group: GroupFigures | None = None
    tiles: TileShape | None = None

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_gib >= self.memory_gib:
            raise ValueError(
                f"reserved_gib {self.reserved_gib:g} leaves nothing of memory_gib "
                f"{self.memory_gib:g}; lower the one or raise the other"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults_of_later_fields(
        self, dump: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        """Leave defaults of newer fields out, so that digests of older clusters do not change."""
        data: dict[str, Any] = dump(self)
        for name in _LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                data.pop(name, None)
        if not self.by_class:
            data.pop("by_class", None)
        return data

    def copy_s(self, bytes_: float) -> float:
        """Return the seconds of a copy from the host's memory; 0 where there is none."""
        return 0.0 if self.host_link_gb_per_s is None else bytes_ / (self.host_link_gb_per_s * 1e9)

    def load_s(self, bytes_: float) -> float:
        """Return the seconds for which a batch is waited for; 0 where it is there in time."""
        return 0.0 if self.loader_gb_per_s is None else bytes_ / (self.loader_gb_per_s * 1e9)

    @property
    def members(self) -> int:
        """Devices of a tensor-parallel group; 1 of a single device."""
        return 1 if self.group is None else self.group.devices

    @property
    def optimizer_gb_per_s(self) -> float:
        """Bytes that the optimizer's step reads and writes, in 10^9 bytes/s."""
        return self.memory_bandwidth_gb_per_s * self.optimizer_efficiency

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a plan may use."""
        return int((self.memory_gib - self.reserved_gib) * GIB)

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that a job may choose, sorted."""
        return tuple(sorted(set(self.peak_tflop_per_s) - {TF32}))


Slowdown = Annotated[tuple[Factor, ...], Field(min_length=1)]
"""Factors on the time of computation, by how many devices of a host compute at once, from one."""


def check_slowdown(slowdown: tuple[float, ...], devices: int) -> None:
    """Check the factors of a host.

    Raises:
        ValueError: if they are not one for each number of its devices, or fall, or the first is
            not 1.
    """
    if len(slowdown) != devices:
        raise ValueError(
            f"slowdown has {plural(len(slowdown), 'factor')} for {plural(devices, 'device')}; give "
            "one for each number of devices that compute at once, from one to all"
        )
    if slowdown[0] != 1:
        raise ValueError(
            f"slowdown begins with {slowdown[0]:g}; a device that computes alone is as fast as its "
            "type says, so begin with 1"
        )
    for number, (before, after) in enumerate(pairwise(slowdown), 2):
        if after < before:
            raise ValueError(
                f"slowdown falls from {before:g} to {after:g} with {number} devices; another "
                "device at work makes none faster"
            )


class LinkType(Record):
    """One type of link, per direction, in decimal gigabytes per second.

    A ``full`` duplex link carries one transfer per direction at a time, a ``half`` duplex link one
    in total; a ``shared`` link carries any number at full bandwidth each (a fabric that is never
    the bottleneck).

    Attributes:
        bandwidth_gb_per_s: Bandwidth per direction.
        latency_us: Latency of a message.
        duplex: ``full`` or ``half``.
        shared: Whether any number of transfers run at full bandwidth each.
        source: Source of the figures.
    """

    bandwidth_gb_per_s: Positive
    latency_us: NonNegative = 0.0
    duplex: Literal["full", "half"] = "full"
    shared: bool = False
    source: Source = "datasheet"
