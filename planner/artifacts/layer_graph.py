"""The layer graph: what a model computes, keeps and hands on, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import networkx as nx
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from planner.artifacts.document import (
    Count,
    Record,
    check_format,
    digest,
    digest_of_data,
    read_json,
    write_atomically,
)
from planner.artifacts.read_only import Attributes, read_only
from planner.artifacts.work import PHASES, Work, totals
from planner.errors import PipeplanError

FORMAT = "pipeplan-graph/1"

MEASURED = {"measured", "stash_bytes", "weight_stash_bytes", "peak_bytes"}
"""What of a layer depends on who runs it, and measuring replaces; all else is its structure."""

Seconds = Annotated[float, Field(ge=0, le=1e9)]
Name = Annotated[str, Field(min_length=1, max_length=400)]


class MeasuredTimes(Record):
    """Seconds of one layer and one microbatch on one device type, where they were measured.

    ``backward_s`` is of a backward that is not split; both gradients together if not told.
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

    ``*_flops`` counts a multiply-add as two. ``*_traffic_bytes`` is what the layer's operations
    read and write. ``stash_bytes`` is what autograd keeps from forward for backward, parameters
    excluded; ``weight_stash_bytes`` what of it the weight gradient still needs after the input
    gradient: all of it if not told. ``peak_bytes`` is the most that is held while the layer runs
    forward or backward, beside parameters and their gradients: its stash, what it makes and is
    given for it, and temporaries; see :attr:`LayerGraph.peak_bytes` if it is not told.
    ``parameters`` are the names (FQNs) of the parameters the layer uses; a tied parameter stands
    in several layers. ``measured`` replaces the roofline on a device type. ``work`` divides FLOPs
    and traffic among operations; without it the roofline takes them as one operation.
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
    """One parameter by its fully qualified name.

    ``trainable`` says whether the loss sends it a gradient: it is not frozen, and it is used.
    """

    name: Name
    elements: Count
    bytes: Count
    trainable: bool = True


class Boundary(Record):
    """A tensor that one layer makes and later layers use: what a cut has to send.

    ``saved_by`` is the layer that first keeps it for its backward, if one does; its bytes are
    then part of that layer's ``stash_bytes``.
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
    """The layer graph as data: layers in an executable order, and what passes between them."""

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


class LayerGraph(nx.DiGraph):  # type: ignore[misc]
    """A networkx DiGraph of layers in executable order, read-only.

    Node attributes are the fields of :class:`Layer` plus ``parameter_bytes``; edge attributes are
    ``tensors`` (boundary names) and ``bytes``. ``record`` is the same as plain data. Editing nodes,
    edges or their attributes raises :class:`networkx.NetworkXError`; ``nx.DiGraph(graph)`` is an
    ordinary graph of the same contents, and what the few functions of networkx need that edit a
    ``copy`` (``nx.transitive_closure``): a copy of a layer graph is as read-only as itself. Graphs
    that networkx derives (``subgraph``, ``reverse``, ``nx.relabel_nodes``) are ordinary ones too:
    they have no record.
    """

    record: GraphRecord
    node_attr_dict_factory = Attributes
    edge_attr_dict_factory = Attributes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An ordinary DiGraph: networkx makes the graphs it derives by ``graph.__class__()``."""
        return nx.DiGraph(*args, **kwargs)

    @classmethod
    def from_record(cls, record: GraphRecord) -> LayerGraph:
        """Build the graph of a record."""
        graph: LayerGraph = nx.DiGraph.__new__(cls)
        nx.DiGraph.__init__(graph, name=record.name)
        graph.record = record
        size = {parameter.name: parameter.bytes for parameter in record.parameters}
        for layer in record.layers:
            bytes_ = sum(size[name] for name in layer.parameters)
            fields = layer.model_dump()
            fields["measured"] = read_only(
                {kind: read_only(times) for kind, times in fields["measured"].items()}
            )
            fields["device_types"] = layer.device_types
            fields["work"] = layer.work
            graph.add_node(layer.name, **fields, parameter_bytes=bytes_)
        crossing: dict[tuple[str, str], list[Boundary]] = {}
        for boundary in record.boundaries:
            for user in boundary.users:
                crossing.setdefault((boundary.producer, user), []).append(boundary)
        for (producer, user), tensors in crossing.items():
            graph.add_edge(
                producer,
                user,
                tensors=tuple(tensor.name for tensor in tensors),
                bytes=sum(tensor.bytes for tensor in tensors),
            )
        graph.graph = read_only(graph.graph)
        return nx.freeze(graph)  # type: ignore[no-any-return]

    def copy(self, as_view: bool = False) -> Self:
        """This graph itself: it never changes."""
        return self

    @classmethod
    def parse(cls, data: Any, source: str = "layer graph") -> LayerGraph:
        """Check plain JSON data and build the graph.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls.from_record(GraphRecord.parse(check_format(data, FORMAT, source), source))

    @classmethod
    def load(cls, path: str | Path) -> LayerGraph:
        """Read a graph that :meth:`save` or ``pipeplan trace`` wrote."""
        return cls.parse(read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON, atomically."""
        write_atomically(path, self.record.model_dump_json(indent=1) + "\n")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph's canonical JSON."""
        return digest(self.record)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers by name, in executable order."""
        return {layer.name: layer for layer in self.record.layers}

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by FQN."""
        return {parameter.name: parameter for parameter in self.record.parameters}

    @cached_property
    def peak_bytes(self) -> dict[str, int]:
        """The most that each layer holds while it runs, beside parameters and their gradients.

        Where it is not told: its stash, what it hands on with the gradient of that, the gradients
        that it sends back, and a new gradient of a parameter.
        """
        held = {
            row.name: row.stash_bytes + self.new_gradient_bytes[row.name]
            for row in self.record.layers
        }
        for tensor in self.record.boundaries:
            held[tensor.producer] += 2 * tensor.bytes
            for user in tensor.users if tensor.requires_grad else ():
                held[user] += tensor.bytes
        told = {
            row.name: row.peak_bytes for row in self.record.layers if row.peak_bytes is not None
        }
        return held | told

    @cached_property
    def new_gradient_bytes(self) -> dict[str, int]:
        """Of each layer's largest parameter: a gradient is made, then added to those before it."""
        return {
            row.name: max(
                (p.bytes for p in self.parameters_of([row.name]) if p.trainable), default=0
            )
            for row in self.record.layers
        }

    @cached_property
    def saved_input_bytes(self) -> dict[str, int]:
        """What each layer's stash contains of tensors that it is handed: kept if it runs again."""
        found = dict.fromkeys(self.layers, 0)
        for tensor in self.record.boundaries:
            if tensor.saved_by in tensor.users:
                found[str(tensor.saved_by)] += tensor.bytes
        return found

    def parameters_of(self, layers: Iterable[str]) -> tuple[Parameter, ...]:
        """The parameters a set of layers uses, a tied one once."""
        names = dict.fromkeys(name for layer in layers for name in self.layers[layer].parameters)
        return tuple(self.parameters[name] for name in names)

    def crossing(self, before: Sequence[str]) -> tuple[Boundary, ...]:
        """The boundary tensors alive at a cut: made by ``before``, used by any other layer."""
        inside = set(before)
        return tuple(
            boundary
            for boundary in self.record.boundaries
            if boundary.producer in inside and not inside.issuperset(boundary.users)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and transfer between processes by the record."""
        return (LayerGraph.from_record, (self.record,))


def require_samples(graph: LayerGraph, samples: int) -> None:
    """Refuse a graph traced at another microbatch size than the job's."""
    if graph.record.samples_per_microbatch != samples:
        raise PipeplanError(
            f"layer graph {graph.name!r} was traced with samples_per_microbatch = "
            f"{graph.record.samples_per_microbatch}, the job says {samples}; trace it again"
        )
