"""The layer graph: what a model computes, keeps and hands on, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import networkx as nx

from planner.artifacts.document import digest, read_json, write_atomically
from planner.artifacts.formats import check_format
from planner.artifacts.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.artifacts.read_only import Attributes, read_only
from planner.errors import PipeplanError

FORMAT = "pipeplan-graph/1"


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
