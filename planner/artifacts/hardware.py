"""What one kind of device and one kind of link can do."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.artifacts.document import Record
from planner.artifacts.work import EfficiencyClass

GIB = 2**30
# Far beyond any machine, and near enough for every product and quotient of figures to be finite.
LEAST, MOST = 1e-9, 1e15
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegative = Annotated[float, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=LEAST, le=1)]
Price = Annotated[float, Field(ge=0, le=MOST)]
"""Per hour, in the currency that the cluster names."""
Source = Literal["measured", "datasheet", "assumed"]
"""Where figures come from."""
TF32 = "tf32"
"""The key of ``peak_tflop_per_s`` for what float32 convolutions run at by torch's defaults."""


class ClassEfficiency(Record):
    """What operations of one class reach of a device, where that differs from the others.

    The fields are those of :class:`DeviceType`, whose own values hold where one is not told.

    Attributes:
        efficiency: share of peak.
        bandwidth_efficiency: share of memory bandwidth.
        ramp_up_us: of a product beyond its arithmetic.
    """

    efficiency: Share | None = None
    bandwidth_efficiency: Positive | None = None
    ramp_up_us: NonNegative | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_told(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class DeviceType(Record):
    """One kind of device.

    :mod:`planner.costs.roofline` says how the figures make a time.

    Attributes:
        memory_gib: of one device.
        memory_bandwidth_gb_per_s: decimal gigabytes a second.
        peak_tflop_per_s: by precision (float32, float16, bfloat16, float64), and ``tf32`` for what
            float32 convolutions run at.
        efficiency: the share of peak that operations reach.
        bandwidth_efficiency: the share of memory bandwidth that they reach; more than 1 where a
            cache serves what the tracing counts as traffic.
        ramp_up_us: what a product takes beyond its arithmetic; small ones feel it, which do not
            fill the device.
        operation_overhead_us: what every operation takes more.
        by_class: figures for classes of operations.
        reserved_gib: what driver and framework take before a model has any.
        source: where the figures come from; of a datasheet's, efficiencies and overheads are
            assumptions all the same.
        price_per_hour: what one device costs, in the cluster's ``currency``; it changes no plan.
    """

    memory_gib: Positive
    memory_bandwidth_gb_per_s: Positive
    peak_tflop_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    efficiency: Share = 0.5
    bandwidth_efficiency: Positive = 1.0
    ramp_up_us: NonNegative = 0.0
    operation_overhead_us: NonNegative = 0.0
    by_class: dict[EfficiencyClass, ClassEfficiency] = Field(default_factory=dict)
    reserved_gib: NonNegative = 1.0
    source: Source = "datasheet"
    price_per_hour: Price | None = None

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
        """Clusters that tell none of them keep the digests they had before these fields."""
        data: dict[str, Any] = dump(self)
        later = ("bandwidth_efficiency", "ramp_up_us", "operation_overhead_us")
        for name in (*later, "source", "price_per_hour"):
            if getattr(self, name) == type(self).model_fields[name].default:
                data.pop(name, None)
        if not self.by_class:
            data.pop("by_class", None)
        return data

    @property
    def capacity_bytes(self) -> int:
        """Bytes a plan may use."""
        return int((self.memory_gib - self.reserved_gib) * GIB)

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that a job may choose, sorted."""
        return tuple(sorted(set(self.peak_tflop_per_s) - {TF32}))


class LinkType(Record):
    """One kind of link, per direction, in decimal gigabytes a second.

    A ``full`` duplex link carries one transfer a direction at a time, a ``half`` duplex link one
    in all; a ``shared`` link carries any number at its full bandwidth each (a fabric that is
    never the bottleneck).

    Attributes:
        bandwidth_gb_per_s: of each direction.
        latency_us: of every message.
        duplex: ``full`` or ``half``.
        shared: whether transfers do not wait for each other.
        source: where the figures come from.
    """

    bandwidth_gb_per_s: Positive
    latency_us: NonNegative = 0.0
    duplex: Literal["full", "half"] = "full"
    shared: bool = False
    source: Source = "datasheet"
