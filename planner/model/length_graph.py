"""The layer graph of microbatches of one length, out of a graph of several."""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import PipeplanError
from planner.model.figures import PHASES, totals
from planner.model.graph_record import (
    BytesAtLength,
    GraphRecord,
    Layer,
    WorkAtLength,
)


def layer_at(layer: Layer, row: WorkAtLength) -> Layer:
    """Return a layer as it is for microbatches of one of its lengths.

    What it keeps in memory stays that of the longest.
    """
    sums = {phase: totals(row.work, phase) for phase in PHASES}
    return layer.model_copy(
        update={
            **{f"{phase}_flops": flops for phase, (flops, _) in sums.items()},
            **{f"{phase}_traffic_bytes": moved for phase, (_, moved) in sums.items()},
            "work": row.work,
            "batch_bytes": row.batch_bytes,
            "products": row.products,
            "measured": row.measured,
            "lengths": (),
        }
    )


def record_at(graph: GraphRecord, place: int) -> GraphRecord:
    """Return a graph as it is for microbatches of one length.

    What layers keep in memory stays that of the longest; what is sent is that of the length.

    Args:
        graph: of several lengths.
        place: of the length among them.
    """
    layers = tuple(layer_at(layer, layer.lengths[place]) for layer in graph.layers)
    boundaries = tuple(
        tensor.model_copy(update={"bytes": tensor.lengths[place].bytes, "lengths": ()})
        for tensor in graph.boundaries
    )
    return graph.model_copy(update={"layers": layers, "boundaries": boundaries})


def joined(graphs: Sequence[GraphRecord], lengths: Sequence[tuple[int, float]]) -> GraphRecord:
    """Return the graph of several lengths out of one of each.

    Args:
        graphs: of the same model and job, ascending by length.
        lengths: of each, its tokens and the share of microbatches that have it.

    Raises:
        PipeplanError: if the model has other layers or tensors at one length than at another.
    """
    longest = graphs[-1]
    for graph, (tokens, _) in zip(graphs, lengths, strict=True):
        if _structure(graph) != _structure(longest):
            raise PipeplanError(
                f"lengths.tokens: the model has other layers, or other tensors between them, at "
                f"{tokens} tokens than at {lengths[-1][0]}; leave this length out, or let forward "
                "do the same at every length"
            )
    layers = tuple(
        rows[-1].model_copy(
            update={
                "lengths": tuple(
                    WorkAtLength(
                        tokens=tokens,
                        share=share,
                        work=row.work,
                        batch_bytes=row.batch_bytes,
                        products=row.products,
                    )
                    for row, (tokens, share) in zip(rows, lengths, strict=True)
                )
            }
        )
        for rows in zip(*(graph.layers for graph in graphs), strict=True)
    )
    boundaries = tuple(
        rows[-1].model_copy(
            update={
                "lengths": tuple(
                    BytesAtLength(tokens=tokens, share=share, bytes=row.bytes)
                    for row, (tokens, share) in zip(rows, lengths, strict=True)
                )
            }
        )
        for rows in zip(*(graph.boundaries for graph in graphs), strict=True)
    )
    fields = {name: getattr(longest, name) for name in GraphRecord.model_fields}
    return GraphRecord.model_validate({**fields, "layers": layers, "boundaries": boundaries})


def _structure(graph: GraphRecord) -> object:
    tensors = [(t.name, t.producer, t.users, t.requires_grad) for t in graph.boundaries]
    return [(layer.name, layer.parameters) for layer in graph.layers], tensors
