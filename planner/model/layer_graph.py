"""The layer graph: FLOPs, memory and tensors of a model, layer by layer, as a networkx graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import networkx as nx

from planner.errors import PipeplanError
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter, graph_digest
from planner.records.document import read_json, write_atomically
from planner.records.formats import check_format
from planner.units import plural


class Attributes(dict[str, Any]):
    """A dictionary that is filled once, by its first ``update``, and is then read-only.

    A copy is an ordinary dictionary; values shared by a shallow copy stay read-only.
    """

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Fill an empty dictionary.

        Raises:
            networkx.NetworkXError: if it is already filled.
        """
        if self:
            self._refuse()
        super().update(*args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise nx.NetworkXError(
            "the attributes of a layer graph are read-only: solvers read its record; make another "
            "with LayerGraph.from_record, or edit an ordinary nx.DiGraph(graph)"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = setdefault = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def read_only(values: dict[str, Any]) -> dict[str, Any]:
    """Return a read-only copy of a dictionary."""
    attributes = Attributes()
    attributes.update(values)
    return attributes


FORMAT = "pipeplan-graph/2"


class LayerGraph(nx.DiGraph):  # type: ignore[misc]
    """A networkx DiGraph of layers in executable order, read-only.

    Node attributes are the fields of :class:`Layer` plus ``parameter_bytes``; edge attributes are
    ``tensors`` (boundary names) and ``bytes``. ``record`` is the same as plain data. Editing nodes,
    edges or their attributes raises :class:`networkx.NetworkXError`.

    ``nx.DiGraph(graph)`` is an ordinary graph with the same contents. The few functions of networkx
    that edit a ``copy`` (``nx.transitive_closure``) need it, because a copy of a layer graph is
    read-only too. Graphs that networkx derives (``subgraph``, ``reverse``, ``nx.relabel_nodes``)
    are ordinary graphs without a record.
    """

    record: GraphRecord
    node_attr_dict_factory = Attributes
    edge_attr_dict_factory = Attributes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary DiGraph: networkx makes derived graphs by ``graph.__class__()``."""
        return nx.DiGraph(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the numbers of layers and tensors, in a line."""
        return (
            f"<LayerGraph: {self.record.name}, {plural(len(self.record.layers), 'layer')}, "
            f"{plural(len(self.record.boundaries), 'tensor')} between them>"
        )

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
        """Return this graph itself, since it never changes."""
        return self

    @classmethod
    def parse(cls, data: Any, source: str = "layer graph") -> LayerGraph:
        """Check plain JSON data and build the graph.

        Raises:
            PipeplanError: naming every wrong field.
        """
        record = GraphRecord.parse(check_format(data, FORMAT, source), source)
        if record.on_types:
            raise PipeplanError(
                f"{source}: on_types: {', '.join(record.on_types)}, but a file has the figures of "
                'single devices; remove it and plan with tensor_parallel = "any"'
            )
        return cls.from_record(record)

    @classmethod
    def load(cls, path: str | Path) -> LayerGraph:
        """Read a graph that :meth:`save` or ``pipeplan trace`` wrote."""
        return cls.parse(read_json(path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON, atomically."""
        write_atomically(path, self.record.model_dump_json(indent=1) + "\n")

    def on(self, device_type: str) -> LayerGraph:
        """Return the graph with the figures that devices of a type have, usually itself.

        Types have other figures where they are tensor-parallel groups of several sizes. Those of
        this graph are then the least of all, which suit bounds.
        """
        return self._on_types.get(device_type, self)

    @cached_property
    def _on_types(self) -> dict[str, LayerGraph]:
        """The graphs of types that have figures of their own; types of equal figures share one."""
        made: dict[int, LayerGraph] = {}
        for record in self.record.on_types.values():
            if id(record) not in made:
                made[id(record)] = LayerGraph.from_record(record)
        return {name: made[id(record)] for name, record in self.record.on_types.items()}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph's canonical JSON."""
        return graph_digest(self.record)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers by name, in executable order."""
        return {layer.name: layer for layer in self.record.layers}

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.layers)}

    def in_order(self, layers: Iterable[str]) -> list[str]:
        """Return layers as they run: in the order of the graph, however they are listed."""
        return sorted(layers, key=self._positions.__getitem__)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by FQN."""
        return {parameter.name: parameter for parameter in self.record.parameters}

    @cached_property
    def peak_bytes(self) -> dict[str, int]:
        """Peak memory of each layer while it runs, without parameters and their gradients.

        Where the record has no value: its stash, what its backward makes again, its outputs with
        their gradients, the gradients that it sends back, and a new gradient of a parameter.
        """
        held = {
            row.name: row.stash_bytes + row.again_bytes + self.new_gradient_bytes[row.name]
            for row in self.record.layers
        }
        for tensor in self.record.boundaries:
            held[tensor.producer] += 2 * tensor.bytes
            for user in tensor.users if tensor.requires_grad else ():
                held[user] += tensor.bytes
        known = {
            row.name: row.peak_bytes for row in self.record.layers if row.peak_bytes is not None
        }
        return held | known

    @cached_property
    def new_gradient_bytes(self) -> dict[str, int]:
        """Bytes of each layer's largest parameter: a gradient before it is accumulated."""
        return {
            row.name: max(
                (p.bytes for p in self.parameters_of([row.name]) if p.trainable), default=0
            )
            for row in self.record.layers
        }

    @cached_property
    def own_parameters(self) -> dict[str, tuple[Parameter, ...]]:
        """Trainable parameters of each layer that no other layer uses."""
        layers = self.record.layers
        users = Counter(name for row in layers for name in dict.fromkeys(row.parameters))
        return {
            row.name: tuple(
                p for p in self.parameters_of([row.name]) if p.trainable and users[p.name] == 1
            )
            for row in layers
        }

    @cached_property
    def saved_input_bytes(self) -> dict[str, int]:
        """Bytes of input tensors in each layer's stash, which stay if the layer is recomputed."""
        found = dict.fromkeys(self.layers, 0)
        for tensor in self.record.boundaries:
            if tensor.saved_by in tensor.users:
                found[str(tensor.saved_by)] += tensor.bytes
        return found

    def parameters_of(self, layers: Iterable[str]) -> tuple[Parameter, ...]:
        """Return the parameters that a set of layers uses, tied ones once."""
        names = dict.fromkeys(name for layer in layers for name in self.layers[layer].parameters)
        return tuple(self.parameters[name] for name in names)

    def crossing(self, before: Sequence[str]) -> tuple[Boundary, ...]:
        """Return the boundary tensors at a cut: produced by ``before``, used by any other layer."""
        inside = set(before)
        return tuple(
            boundary
            for boundary in self.record.boundaries
            if boundary.producer in inside and not inside.issuperset(boundary.users)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the record instead of the graph."""
        return (LayerGraph.from_record, (self.record,))


def require_samples(graph: LayerGraph, samples: int) -> None:
    """Refuse a graph traced at another microbatch size than the job's."""
    if graph.record.samples_per_microbatch != samples:
        raise PipeplanError(
            f"layer graph {graph.name!r} was traced with samples_per_microbatch = "
            f"{graph.record.samples_per_microbatch}, the job says {samples}; trace it again"
        )
