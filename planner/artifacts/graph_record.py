"""The layer graph as data: layers in an executable order, and what passes between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.artifacts.document import Count, Record, digest_of_data
from planner.artifacts.work import PHASES, Work, totals

MEASURED = {"measured", "stash_bytes", "weight_stash_bytes", "peak_bytes"}
"""What of a layer depends on who runs it, and measuring replaces; all else is its structure."""

Seconds = Annotated[float, Field(ge=0, le=1e9)]
Name = Annotated[str, Field(min_length=1, max_length=400)]


class MeasuredTimes(Record):
    """Seconds of one layer and one microbatch on one device type, where they were measured.

    Attributes:
        forward_s: of the forward.
        input_gradient_s: of the first half of a split backward.
        weight_gradient_s: of the second half.
        backward_s: of a backward that is not split; both gradients together if not told.
    """

    forward_s: Seconds
    input_gradient_s: Seconds
    weight_gradient_s: Seconds
    backward_s: Seconds | None = None

    @property
    def whole_backward_s(self) -> float:
        """Of a backward that is not split."""
        apart_s = self.input_gradient_s + self.weight_gradient_s
        return apart_s if self.backward_s is None else self.backward_s

    @model_serializer(mode="wrap")
    def _without_what_is_not_told(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialise(self)
        if self.backward_s is None:
            data.pop("backward_s", None)
        return data


class Layer(Record):
    """The smallest unit a stage may hold; all figures are for one microbatch.

    Attributes:
        name: of the layer.
        forward_flops: of the forward; a multiply-add counts as two.
        input_gradient_flops: of the gradient of its inputs.
        weight_gradient_flops: of the gradient of its parameters.
        forward_traffic_bytes: what the forward's operations read and write.
        input_gradient_traffic_bytes: of the gradient of its inputs.
        weight_gradient_traffic_bytes: of the gradient of its parameters.
        stash_bytes: what autograd keeps from forward for backward, parameters excluded.
        weight_stash_bytes: what of the stash the weight gradient still needs after the input
            gradient: all of it if not told.
        peak_bytes: the most that is held while the layer runs forward or backward, beside
            parameters and their gradients: its stash, what it makes and is given for it, and
            temporaries; see :attr:`LayerGraph.peak_bytes` if it is not told.
        parameters: names (FQNs) of the parameters it uses; a tied one stands in several layers.
        measured: times by device type; they replace the roofline there.
        device_types: it may run on these alone; empty: on all.
        work: FLOPs and traffic by operations; without it the roofline takes them as one operation.
    """

    name: Name
    forward_flops: Count
    input_gradient_flops: Count
    weight_gradient_flops: Count
    forward_traffic_bytes: Count
    input_gradient_traffic_bytes: Count
    weight_gradient_traffic_bytes: Count
    stash_bytes: Count
    weight_stash_bytes: Count | None = None
    peak_bytes: Count | None = None
    parameters: tuple[Name, ...] = ()
    measured: dict[Name, MeasuredTimes] = Field(default_factory=dict)
    device_types: tuple[Name, ...] = ()
    work: tuple[Work, ...] = ()

    @model_validator(mode="after")
    def _work_adds_up(self) -> Self:
        for phase in PHASES if self.work else ():
            for name, value in zip(
                ("flops", "traffic_bytes"), totals(self.work, phase), strict=True
            ):
                told = getattr(self, f"{phase}_{name}")
                if told != value:
                    raise ValueError(
                        f"{phase}_{name} is {told}, its rows of work add up to {value}; correct "
                        "the one or the other, or remove work"
                    )
        return self

    @model_serializer(mode="wrap")
    def _without_empty_rules(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        if not self.device_types:
            del fields["device_types"]
        if not self.work:
            fields.pop("work", None)  # Who dumps may have left it out.
        for name in ("weight_stash_bytes", "peak_bytes"):
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields

    @property
    def kept_for_weights_bytes(self) -> int:
        """What the weight gradient still needs once the input gradient is done."""
        return self.stash_bytes if self.weight_stash_bytes is None else self.weight_stash_bytes

    def may_run_on(self, device_type: str) -> bool:
        """Whether a device of this type can run the layer."""
        return not self.device_types or device_type in self.device_types


class Parameter(Record):
    """One parameter of the model.

    Attributes:
        name: its fully qualified name.
        elements: how many numbers it has.
        bytes: that they take.
        trainable: whether the loss sends it a gradient: it is not frozen, and it is used.
    """

    name: Name
    elements: Count
    bytes: Count
    trainable: bool = True


class Boundary(Record):
    """A tensor that one layer makes and later layers use: what a cut has to send.

    Attributes:
        name: of the tensor.
        producer: the layer that makes it.
        users: later layers that use it.
        bytes: of one microbatch.
        shape: of one microbatch.
        dtype: of its elements.
        requires_grad: whether a gradient comes back.
        saved_by: the layer that first keeps it for its backward, if one does; its bytes are then
            part of that layer's ``stash_bytes``.
    """

    name: Name
    producer: Name
    users: Annotated[tuple[Name, ...], Field(min_length=1)]
    bytes: Count
    shape: tuple[Count, ...]
    dtype: Name
    requires_grad: bool
    saved_by: Name | None = None


class GraphRecord(Record):
    """The layer graph as data: layers in an executable order, and what passes between them.

    Attributes:
        format: ``pipeplan-graph/1``.
        name: of the model.
        samples_per_microbatch: that all figures are for.
        precision: of the weights.
        layers: in an executable order.
        boundaries: the tensors between layers.
        parameters: all of the model.
        flop_coverage: share of the operations whose FLOPs could be counted.
        uncounted_operators: names of the others.
    """

    format: Literal["pipeplan-graph/1"] = "pipeplan-graph/1"
    name: Name
    samples_per_microbatch: Annotated[int, Field(ge=1)]
    precision: Name
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    boundaries: tuple[Boundary, ...]
    parameters: tuple[Parameter, ...]
    flop_coverage: Annotated[float, Field(ge=0, le=1)] = 1.0
    uncounted_operators: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        position = {layer.name: index for index, layer in enumerate(self.layers)}
        parameters = {parameter.name for parameter in self.parameters}
        if len(position) < len(self.layers):
            raise ValueError(f"layers: {_twice(self.layers)}")
        if len(parameters) < len(self.parameters):
            raise ValueError(f"parameters: {_twice(self.parameters)}")
        if len({boundary.name for boundary in self.boundaries}) < len(self.boundaries):
            raise ValueError(f"boundaries: {_twice(self.boundaries)}")
        for index, layer in enumerate(self.layers):
            for name in layer.parameters:
                if name not in parameters:
                    raise ValueError(
                        f"layers[{index}].parameters: layer {layer.name!r} uses unknown parameter "
                        f"{name!r}; add it to parameters or leave it out here"
                    )
        for index, boundary in enumerate(self.boundaries):
            _check_boundary(f"boundaries[{index}]", boundary, position)
        return self


def _twice(rows: Sequence[Layer] | Sequence[Parameter] | Sequence[Boundary]) -> str:
    name, count = Counter(row.name for row in rows).most_common(1)[0]
    return f"{count} of them have the same name {name!r}; names must be unique"


def _check_boundary(field: str, boundary: Boundary, position: dict[str, int]) -> None:
    saver = [boundary.saved_by] if boundary.saved_by is not None else []
    for name in (boundary.producer, *boundary.users, *saver):
        if name not in position:
            raise ValueError(
                f"{field}: tensor {boundary.name!r} names unknown layer {name!r}; correct it or "
                "add the layer"
            )
    for user in boundary.users:
        if position[user] <= position[boundary.producer]:
            raise ValueError(
                f"{field}: tensor {boundary.name!r} goes from {boundary.producer!r} back to "
                f"{user!r}; list the layers in an executable order (a cycle has none)"
            )


def structure_digest(record: GraphRecord) -> str:
    """SHA-256 of a graph without what is measured: equal before and after a calibration."""
    return digest_of_data(record.model_dump(mode="json", exclude={"layers": {"__all__": MEASURED}}))
