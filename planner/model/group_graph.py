"""The layer graph as a tensor-parallel group runs it: figures of all its devices together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from planner.errors import PipeplanError
from planner.model.graph_record import SHARED, Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import LayerSplit, SplitRecord
from planner.records.document import Record

_Row = TypeVar("_Row", bound=Record)


def split_of(graph: GraphRecord, degree: int, *, sequence: bool) -> SplitRecord:
    """Return how a graph splits over groups of a degree.

    Args:
        graph: the layer graph.
        degree: devices of a group.
        sequence: whether values between regions are shared by positions.

    Raises:
        PipeplanError: if it was not traced with such a split.
    """
    for split in graph.splits:
        if (split.degree, split.sequence) == (degree, sequence):
            return split
    shared = ", values between regions shared by positions" if sequence else ""
    raise PipeplanError(
        f"tensor_parallel = {degree}: the layer graph of {graph.name!r} has no split over groups "
        f"of {degree}{shared}; trace the model again with `pipeplan trace MODEL --split {degree}"
        f"{' --sequence' if sequence else ''} -o GRAPH.json`, or name the model instead of a graph"
    )


def group_graph(
    graph: GraphRecord,
    splits: Mapping[int, SplitRecord],
    sizes: Mapping[str, int],
    types: Mapping[str, Sequence[str]],
    *,
    in_parts: bool = False,
) -> GraphRecord:
    """Return a graph whose figures are those of all devices of a group together.

    What each device has a share of counts once, and what every device has or does counts for each.
    Operations are counted once, since all devices start theirs at the same time. Measured times are
    those of groups. Groups of several sizes have a graph each (:attr:`GraphRecord.on_types`).

    Args:
        graph: the layer graph of single devices.
        splits: how it splits over groups, by their size; none for single devices.
        sizes: devices of a group, by its device type.
        types: device types of groups by the type of their devices.
        in_parts: whether groups send each other parts of what all their devices have whole.

    Raises:
        PipeplanError: if a layer's times were measured on a single device of a group's type alone.
    """
    of_size = {}
    for size in sorted({*sizes.values()}):
        split = splits.get(size)
        of_this = {
            name: tuple(kind for kind in kinds if sizes[kind] == size)
            for name, kinds in types.items()
        }
        if split is not None:
            _require_of_groups(graph, split, [name for name, kinds in of_this.items() if kinds])
        of_size[size] = _of_size(graph, split, types, of_this, in_parts=in_parts)
    if len(of_size) == 1:
        return next(iter(of_size.values()))
    least = _least([*of_size.values()])
    return GraphRecord.model_validate(
        {
            **{name: getattr(graph, name) for name in GraphRecord.model_fields},
            **least,
            "splits": (),
            "on_types": {kind: of_size[size] for kind, size in sizes.items()},
        }
    )


def _of_size(
    graph: GraphRecord,
    split: SplitRecord | None,
    types: Mapping[str, Sequence[str]],
    of_size: Mapping[str, Sequence[str]],
    *,
    in_parts: bool,
) -> GraphRecord:
    """Return the graph as groups of one size run it; without a split, as single devices do.

    Args:
        graph: of single devices.
        split: over groups of the size.
        types: of all groups, by the type of their devices.
        of_size: those of this size.
        in_parts: see :func:`group_graph`.
    """
    changed: dict[str, Any] = {
        "layers": tuple(_on_kinds(layer, types) for layer in graph.layers),
        "splits": (),
    }
    if split is not None:
        changed["layers"] = tuple(
            _layer(layer, row, split, of_size)
            for layer, row in zip(changed["layers"], split.layers, strict=True)
        )
        changed["boundaries"] = tuple(_boundaries(graph, split, in_parts=in_parts))
        changed["parameters"] = tuple(_parameters(graph, split))
    fields = {name: getattr(graph, name) for name in GraphRecord.model_fields}
    return GraphRecord.model_validate({**fields, **changed})


def _on_kinds(layer: Layer, types: Mapping[str, Sequence[str]]) -> Layer:
    """Return a layer that may run on groups of the devices that it may run on."""
    kinds = (t for name in layer.device_types for t in types.get(name, (name,)))
    return layer.model_copy(update={"device_types": tuple(dict.fromkeys(kinds))})


def _least(graphs: Sequence[GraphRecord]) -> dict[str, Any]:
    """Return the layers, tensors and parameters of a graph with the least figures of several."""
    peaks = [LayerGraph.from_record(graph).peak_bytes for graph in graphs]
    layers = []
    for rows in zip(*(graph.layers for graph in graphs), strict=True):
        least = _smallest(rows, (name for name in SHARED if name != "weight_stash_bytes"))
        least["weight_stash_bytes"] = min(row.kept_for_weights_bytes for row in rows)
        least["peak_bytes"] = min(peak[rows[0].name] for peak in peaks)
        # Seconds are those of the types.
        least |= {"work": (), "collectives": (), "products": (), "measured": {}}
        layers.append(rows[0].model_copy(update=least))
    tensors = zip(*(graph.boundaries for graph in graphs), strict=True)
    parameters = zip(*(graph.parameters for graph in graphs), strict=True)
    return {
        "layers": tuple(layers),
        "boundaries": tuple(_with_least(rows, ("bytes",)) for rows in tensors),
        "parameters": tuple(_with_least(rows, ("bytes", "elements")) for rows in parameters),
    }


def _smallest(rows: Sequence[Record], names: Iterable[str]) -> dict[str, Any]:
    return {name: min(getattr(row, name) for row in rows) for name in names}


def _with_least(rows: Sequence[_Row], names: Iterable[str]) -> _Row:
    return rows[0].model_copy(update=_smallest(rows, names))


def region_cuts(graph: GraphRecord, split: SplitRecord) -> frozenset[str]:
    """Return the layers before which no stage can begin, because a cut would divide a region."""
    inside = {row.name for row in split.boundaries if row.placement == "region"}
    place = {layer.name: position for position, layer in enumerate(graph.layers)}
    names = tuple(place)
    return frozenset(
        name
        for tensor in graph.boundaries
        if tensor.name in inside
        for name in names[
            place[tensor.producer] + 1 : max(place[user] for user in tensor.users) + 1
        ]
    )


def _require_of_groups(graph: GraphRecord, split: SplitRecord, types: Sequence[str]) -> None:
    """Refuse times of whole layers where there are none of groups."""
    for layer, row in zip(graph.layers, split.layers, strict=True):
        measured = sorted((layer.measured.keys() & set(types)) - row.measured.keys())
        if measured:
            raise PipeplanError(
                f"tensor_parallel = {split.degree}: layer {layer.name!r} was measured whole on "
                f"{', '.join(measured)}, which says nothing about a share of it; leave --costs "
                "out, calibrate a plan of such groups, or set tensor_parallel to 1"
            )


def _layer(
    layer: Layer, row: LayerSplit, split: SplitRecord, types: Mapping[str, Sequence[str]]
) -> Layer:
    degree = split.degree or 1
    whole = {name: getattr(layer, name) for name in SHARED}
    whole["weight_stash_bytes"] = layer.kept_for_weights_bytes
    return Layer.model_validate(
        {
            **{name: getattr(layer, name) for name in Layer.model_fields},
            **{name: _of_all(whole[name], getattr(row, name), degree) for name in SHARED},
            "peak_bytes": None,
            "measured": {
                kind: times for name, times in row.measured.items() for kind in types.get(name, ())
            },
            "work": row.work,
            "collectives": row.collectives,
            "products": tuple(product.of_share(degree) for product in row.products),
        }
    )


def _of_all(whole: int, shared: int, degree: int) -> int:
    return shared + degree * (whole - shared)


def _boundaries(graph: GraphRecord, split: SplitRecord, *, in_parts: bool) -> Iterator[Boundary]:
    placed = {row.name: row.placement for row in split.boundaries}
    for tensor in graph.boundaries:
        copies = (split.degree or 1) if placed[tensor.name] == "whole" else 1
        parts = copies if in_parts else 1
        yield tensor.model_copy(update={"bytes": copies * tensor.bytes, "parts": parts})


def _parameters(graph: GraphRecord, split: SplitRecord) -> Iterator[Parameter]:
    shared = {row.name for region in split.regions for row in region.parameters}
    summed = set(split.summed_parameters)
    for row in graph.parameters:
        copies = 1 if row.name in shared else split.degree or 1
        yield row.model_copy(
            update={
                "elements": copies * row.elements,
                "bytes": copies * row.bytes,
                "summed": row.name in summed,
            }
        )
