"""What one kind of device and one kind of link can do."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planner.artifacts.document import Record

GIB = 2**30
# Far beyond any machine, and near enough for every product and quotient of figures to be finite.
LEAST, MOST = 1e-9, 1e15
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegative = Annotated[float, Field(ge=0, le=MOST)]
Source = Literal["measured", "datasheet", "assumed"]
"""Where figures come from."""


class DeviceType(Record):
    """One kind of device.

    ``peak_tflop_per_s`` is by precision (float32, float16, bfloat16); ``efficiency`` the share of
    it that a layer reaches; ``reserved_gib`` what the driver and the framework take before a
    model has any. ``source`` says where the figures come from; of a datasheet's, ``efficiency`` is
    an assumption all the same.
    """

    memory_gib: Positive
    memory_bandwidth_gb_per_s: Positive
    peak_tflop_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    efficiency: Annotated[float, Field(ge=LEAST, le=1)] = 0.5
    reserved_gib: NonNegative = 1.0
    source: Source = "datasheet"

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_gib >= self.memory_gib:
            raise ValueError(
                f"reserved_gib {self.reserved_gib:g} leaves nothing of memory_gib "
                f"{self.memory_gib:g}; lower the one or raise the other"
            )
        return self

    @property
    def capacity_bytes(self) -> int:
        """Bytes a plan may use."""
        return int((self.memory_gib - self.reserved_gib) * GIB)


class LinkType(Record):
    """One kind of link, per direction, in decimal gigabytes a second.

    A ``full`` duplex link carries one transfer a direction at a time, a ``half`` duplex link one
    in all; a ``shared`` link carries any number at its full bandwidth each (a fabric that is
    never the bottleneck).
    """

    bandwidth_gb_per_s: Positive
    latency_us: NonNegative = 0.0
    duplex: Literal["full", "half"] = "full"
    shared: bool = False
    source: Source = "datasheet"
