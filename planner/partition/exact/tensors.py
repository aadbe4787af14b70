"""Tensors between layers, by the layers' positions."""

from __future__ import annotations

from dataclasses import dataclass

from planner.artifacts.layer_graph import LayerGraph


@dataclass(frozen=True)
class CutTensor:
    """A tensor that a cut has to send.

    Attributes:
        producer: the layer that makes it.
        users: the layers that use it, ascending.
        saver: the layer that keeps it for its backward, if one does.
        bytes: of the activation.
        gradient_bytes: sent back; 0 if it needs no gradient.
    """

    producer: int
    users: tuple[int, ...]
    saver: int | None
    bytes: int
    gradient_bytes: int


def cut_tensors(graph: LayerGraph) -> tuple[CutTensor, ...]:
    """The tensors of a layer graph that have any bytes."""
    position = {name: index for index, name in enumerate(graph.layers)}
    return tuple(
        CutTensor(
            producer=position[tensor.producer],
            users=tuple(sorted(position[user] for user in tensor.users)),
            saver=None if tensor.saved_by is None else position[tensor.saved_by],
            bytes=tensor.bytes,
            gradient_bytes=tensor.bytes if tensor.requires_grad else 0,
        )
        for tensor in graph.record.boundaries
        if tensor.bytes
    )
