"""The layer graph as data: layers in an executable order, and the tensors between them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from planner.model.figures import (
    PHASES,
    Collective,
    LayerFigures,
    MeasuredTimes,
    Name,
    Product,
    Work,
    totals,
)
from planner.model.split_record import LayerSplit, SplitRecord
from planner.records.document import (
    MOST_ENTRIES,
    Count,
    Record,
    digest_of_data,
    left_out,
)

MEASURED: dict[str, Any] = {
    **dict.fromkeys(("measured", "stash_bytes", "weight_stash_bytes", "peak_bytes"), True),
    "lengths": {"__all__": {"measured"}},
}
"""Fields of a layer that depend on the device and that measuring replaces; all others are
structure."""
MEASURED_SHARES: dict[str, Any] = {"__all__": {"layers": {"__all__": {"measured"}}}}
"""The same of a graph's splits."""

SHARED = (
    *(f"{phase}_{what}" for phase in PHASES for what in ("flops", "traffic_bytes")),
    "stash_bytes",
    "weight_stash_bytes",
    "again_bytes",
)
"""Fields of a layer of which the devices of a tensor-parallel group may have shares."""

ROUNDING = 1e-9
"""The most by which shares may miss 1."""


class WorkAtLength(Record):
    """What a layer does for a microbatch of one of several lengths.

    Attributes:
        tokens: The length.
        share: Share of microbatches that have it.
        work: FLOPs and traffic by class of operation.
        batch_bytes: Bytes of the entries of the batch that it reads.
        products: Matrix products of the forward.
        measured: Measured times by device type, used instead of the roofline.
    """

    tokens: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(gt=0, le=1)]
    work: tuple[Work, ...] = ()
    batch_bytes: Count = 0
    products: tuple[Product, ...] = ()
    measured: dict[Name, MeasuredTimes] = left_out({})


class BytesAtLength(Record):
    """What a tensor between layers has for a microbatch of one of several lengths.

    Attributes:
        tokens: The length.
        share: Share of microbatches that have it.
        bytes: Bytes of one microbatch.
    """

    tokens: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(gt=0, le=1)]
    bytes: Count


class Layer(LayerFigures):
    """The smallest unit of a stage; all figures are for one microbatch.

    Attributes:
        weight_stash_bytes: Part of the stash that the weight gradient still needs after a split
            input gradient; null: all of it.
        peak_bytes: Most memory held while the layer runs, without parameters and their gradients:
            stash, inputs, outputs and temporaries; null: see :attr:`LayerGraph.peak_bytes`.
        again_bytes: Bytes that the layer does not keep but its backward makes again, as those of
            recomputed attention: no part of the stash, but of the memory held while it runs.
        parameters: Names (FQNs) of its parameters; a tied parameter appears in several layers.
        writes: Buffers that its forward writes and whose value depends on the microbatches before;
            running statistics of normalisations and counters are none.
        batch_bytes: Bytes of the entries of the batch, inputs and targets, that it reads, and that
            are copied to a GPU for it.
        measured: Measured times by device type, used instead of the roofline.
        device_types: Device types it may run on; empty: all.
        work: FLOPs and traffic by class of operation; without it the roofline treats the layer as
            one operation.
        collectives: What the devices of a tensor-parallel group exchange while they run the layer;
            all other figures are then those of all devices together.
        products: Matrix products of the forward as one device runs them, for the efficiency of
            their shapes; empty: they are not known.
        lengths: What it does at each length, ascending, where microbatches have several; all other
            figures are then those of the longest.
    """

    weight_stash_bytes: Count | None = left_out(None)
    peak_bytes: Count | None = left_out(None)
    again_bytes: Count = left_out(0)
    parameters: tuple[Name, ...] = ()
    writes: tuple[Name, ...] = left_out(())
    batch_bytes: Count = left_out(0)
    measured: dict[Name, MeasuredTimes] = Field(default_factory=dict)
    device_types: tuple[Name, ...] = left_out(())
    work: tuple[Work, ...] = left_out(())
    collectives: tuple[Collective, ...] = left_out(())
    products: tuple[Product, ...] = left_out(())
    lengths: tuple[WorkAtLength, ...] = left_out(())

    @model_validator(mode="after")
    def _work_adds_up(self) -> Self:
        for phase in PHASES if self.work else ():
            for name, value in zip(
                ("flops", "traffic_bytes"), totals(self.work, phase), strict=True
            ):
                found = getattr(self, f"{phase}_{name}")
                if found != value:
                    raise ValueError(
                        f"{phase}_{name} is {found}, its rows of work add up to {value}; correct "
                        "the one or the other, or remove work"
                    )
        return self

    @property
    def kept_for_weights_bytes(self) -> int:
        """Bytes that the weight gradient still needs after the input gradient."""
        return self.stash_bytes if self.weight_stash_bytes is None else self.weight_stash_bytes

    @property
    def mean_batch_bytes(self) -> float:
        """Bytes of the batch that it reads, in the mean over lengths."""
        if not self.lengths:
            return self.batch_bytes
        return sum(row.share * row.batch_bytes for row in self.lengths)

    def may_run_on(self, device_type: str) -> bool:
        """Return whether a device of this type can run the layer."""
        return not self.device_types or device_type in self.device_types


class Parameter(Record):
    """One parameter of the model.

    Attributes:
        name: Fully qualified name.
        elements: Number of elements.
        bytes: Bytes of all elements.
        trainable: Whether it receives a gradient (used and not frozen).
        summed: Whether the devices of a tensor-parallel group, each of which has it whole, sum
            their gradients of it before the optimizer step; elements and bytes are then those of
            all devices together.
    """

    name: Name
    elements: Count
    bytes: Count
    trainable: bool = True
    summed: bool = left_out(False)


class Boundary(Record):
    """A tensor that one layer produces and later layers use: what a cut has to send.

    Attributes:
        name: Name of the tensor.
        producer: Layer that produces it.
        users: Later layers that use it.
        bytes: Bytes of one microbatch.
        shape: Shape of one microbatch.
        dtype: Data type of its elements.
        requires_grad: Whether a gradient is sent back.
        saved_by: First layer that keeps it for its backward (its bytes are then part of that
            layer's ``stash_bytes``); null: none.
        lengths: Its bytes at each length, ascending, where microbatches have several; all other
            figures are then those of the longest.
        parts: Devices of a tensor-parallel group that each have it whole and send one part of it,
            which the group that receives them gathers; bytes are those of all devices together.
    """

    name: Name
    producer: Name
    users: Annotated[tuple[Name, ...], Field(min_length=1)]
    bytes: Count
    shape: tuple[Count, ...]
    dtype: Name
    requires_grad: bool
    saved_by: Name | None = None
    lengths: tuple[BytesAtLength, ...] = left_out(())
    parts: Annotated[int, Field(ge=1)] = left_out(1)

    @property
    def message_bytes(self) -> int:
        """Bytes that are sent of a microbatch, in the mean over lengths, rounded down."""
        if not self.lengths:
            return self.bytes // self.parts
        return int(sum(row.share * row.bytes for row in self.lengths))


class GraphRecord(Record):
    """The layer graph as data: layers in an executable order, and the tensors between them.

    Attributes:
        format: ``pipeplan-graph/2``.
        name: Name of the model.
        samples_per_microbatch: Microbatch size of all figures.
        precision: Data type of the weights.
        layers: Layers in an executable order.
        boundaries: Tensors between layers.
        parameters: All parameters of the model.
        flop_coverage: Fraction of operators with counted FLOPs.
        uncounted_operators: Names of the other operators, counted as free.
        splits: How it splits over tensor-parallel groups: for each degree that was traced, with
            values between regions shared by positions or whole.
        recomputes_attention: Whether the core of attention runs again in the backward, in all of
            these figures.
        on_types: The same layers, tensors and parameters as devices of a type have them, by its
            name, where types have other FLOPs and bytes: tensor-parallel groups of several sizes.
            All other figures are then the least that any type has, and times are those by type.
            Problems of groups have it, files do not.
    """

    format: Literal["pipeplan-graph/2"] = "pipeplan-graph/2"
    name: Name
    samples_per_microbatch: Annotated[int, Field(ge=1)]
    precision: Name
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
    boundaries: Annotated[tuple[Boundary, ...], Field(max_length=MOST_ENTRIES)]
    parameters: Annotated[tuple[Parameter, ...], Field(max_length=MOST_ENTRIES)]
    flop_coverage: Annotated[float, Field(ge=0, le=1)] = 1.0
    uncounted_operators: tuple[str, ...] = ()
    splits: tuple[SplitRecord, ...] = left_out(())
    recomputes_attention: bool = left_out(False)
    on_types: SkipJsonSchema[dict[Name, GraphRecord]] = left_out({})  # In no file.

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        position = {layer.name: index for index, layer in enumerate(self.layers)}
        parameters = {parameter.name for parameter in self.parameters}
        for kind in ("layers", "parameters", "boundaries"):
            names = Counter(row.name for row in getattr(self, kind))
            for name, count in names.most_common(1):
                if count > 1:
                    raise ValueError(
                        f"{kind}: {count} of them have the same name {name!r}; names must be unique"
                    )
        for index, layer in enumerate(self.layers):
            for name in layer.parameters:
                if name not in parameters:
                    raise ValueError(
                        f"layers[{index}].parameters: layer {layer.name!r} uses unknown parameter "
                        f"{name!r}; add it to parameters or leave it out here"
                    )
        for index, boundary in enumerate(self.boundaries):
            _check_boundary(f"boundaries[{index}]", boundary, position)
        _check_splits(self)
        _check_lengths(self)
        return self

    @property
    def lengths(self) -> tuple[tuple[int, float], ...]:
        """The lengths of microbatches in tokens, each with its share; empty if all are equal."""
        return tuple((row.tokens, row.share) for row in self.layers[0].lengths)


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


def _check_lengths(record: GraphRecord) -> None:
    """Refuse lengths that differ from layer to layer, or do not fit the other figures."""
    expected = record.lengths
    tokens = [length for length, _ in expected]
    if tokens != sorted(set(tokens)):
        raise ValueError("layers[0].lengths: their tokens do not ascend; trace the model again")
    if expected and abs(sum(share for _, share in expected) - 1) > ROUNDING:
        raise ValueError("layers[0].lengths: their shares do not sum to 1; trace the model again")
    for kind in ("layers", "boundaries"):
        for index, row in enumerate(getattr(record, kind)):
            if tuple((part.tokens, part.share) for part in row.lengths) != expected:
                raise ValueError(
                    f"{kind}[{index}].lengths: {row.name!r} has other lengths than the first "
                    "layer; trace the model again"
                )
    for index, layer in enumerate(record.layers if expected else ()):
        is_undivided = not layer.work and any(getattr(layer, f"{p}_flops") for p in PHASES)
        if layer.lengths[-1].work != layer.work or is_undivided:
            raise ValueError(
                f"layers[{index}].lengths: the work of {layer.name!r} at the longest length is not "
                "that of the layer; trace the model again"
            )
        types = [set(row.measured) for row in layer.lengths]
        if layer.lengths[-1].measured != layer.measured or types[1:] != types[:-1]:
            raise ValueError(
                f"layers[{index}].lengths: the measured times of {layer.name!r} are not of the "
                "same device types at every length, or at the longest not those of the layer; "
                "profile the model with a job that has these lengths"
            )
    for index, tensor in enumerate(record.boundaries if expected else ()):
        if max(part.bytes for part in tensor.lengths) != tensor.bytes:
            raise ValueError(
                f"boundaries[{index}].lengths: {tensor.name!r} has {tensor.bytes} bytes, but its "
                f"longest length has {max(part.bytes for part in tensor.lengths)}; trace the model "
                "again"
            )


def _check_splits(record: GraphRecord) -> None:
    names = [layer.name for layer in record.layers]
    tensors = {boundary.name for boundary in record.boundaries}
    seen: set[tuple[int | None, bool]] = set()
    for index, split in enumerate(record.splits):
        if [layer.name for layer in split.layers] != names:
            raise ValueError(
                f"splits[{index}].layers: they are not the layers of the graph in its order; trace "
                "the model again"
            )
        if {boundary.name for boundary in split.boundaries} != tensors:
            raise ValueError(
                f"splits[{index}].boundaries: they are not the tensors of the graph; trace the "
                "model again"
            )
        for layer, row in zip(record.layers, split.layers, strict=True):
            _check_shares(f"splits[{index}]", layer, row)
        if (split.degree, split.sequence) in seen:
            raise ValueError(
                f"splits[{index}]: a second split of degree {split.degree}; keep one of them"
            )
        seen.add((split.degree, split.sequence))


def _check_shares(field: str, layer: Layer, row: LayerSplit) -> None:
    # What was measured of a layer says nothing about shares of it.
    for name in SHARED if not layer.measured else ():
        whole = getattr(layer, name)
        if whole is not None and getattr(row, name) > whole:
            raise ValueError(
                f"{field}: {name} of layer {row.name!r} is {getattr(row, name)}, but the whole "
                f"layer has {whole}; trace the model again"
            )
    if layer.work and not row.work:
        raise ValueError(
            f"{field}: layer {row.name!r} has no rows of work, but the layer has; trace the model "
            "again"
        )


def graph_digest(record: GraphRecord) -> str:
    """Return the SHA-256 of a graph; the number of the format, which may rise, does not count."""
    return digest_of_data(_content(record))


def structure_digest(record: GraphRecord) -> str:
    """Return the SHA-256 of a graph without measured fields.

    It is equal before and after a calibration. Nor do products count, which follow from the rest
    and which older graphs do not have.
    """
    left_out = MEASURED | {"products": True}
    exclude = {"layers": {"__all__": left_out}, "splits": MEASURED_SHARES}
    return digest_of_data(_content(record, exclude=exclude))


def _content(record: GraphRecord, exclude: Any = None) -> dict[str, Any]:
    # Digests of plans have format 1 in them.
    return {**record.model_dump(mode="json", exclude=exclude), "format": "pipeplan-graph/1"}
