"""The layer graph as a tensor-parallel group runs it: figures of all its devices together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.errors import PipeplanError
from planner.model.graph_record import SHARED, Boundary, GraphRecord, Layer, Parameter
from planner.model.split_record import LayerSplit, SplitRecord


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
    split: SplitRecord,
    types: Mapping[str, Sequence[str]],
    *,
    in_parts: bool = False,
) -> GraphRecord:
    """Return a graph whose figures are those of all devices of a group together.

    What each device has a share of counts once, and what every device has or does counts for each.
    Operations are counted once, since all devices start theirs at the same time.

    Args:
        graph: the layer graph of single devices.
        split: how it splits over a group.
        types: device types of groups by the type of their devices.
        in_parts: whether groups send each other parts of what all their devices have whole.

    Raises:
        PipeplanError: if a layer's times were measured on a device of a group.
    """
    _require_computed(graph, split, types)
    parameters = _parameters(graph, split)
    return GraphRecord.model_validate(
        {
            **{name: getattr(graph, name) for name in GraphRecord.model_fields},
            "layers": tuple(
                _layer(layer, row, split, types)
                for layer, row in zip(graph.layers, split.layers, strict=True)
            ),
            "boundaries": tuple(_boundaries(graph, split, in_parts=in_parts)),
            "parameters": tuple(parameters),
            "splits": (),
        }
    )


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


def _require_computed(
    graph: GraphRecord, split: SplitRecord, types: Mapping[str, Sequence[str]]
) -> None:
    for layer in graph.layers:
        measured = sorted(layer.measured.keys() & types.keys())
        if measured:
            raise PipeplanError(
                f"tensor_parallel = {split.degree}: layer {layer.name!r} was measured whole on "
                f"{', '.join(measured)}, which says nothing about a share of it; leave --costs "
                "out, or set tensor_parallel to 1"
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
            "measured": {},
            "device_types": tuple(
                t for name in layer.device_types for t in types.get(name, (name,))
            ),
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
