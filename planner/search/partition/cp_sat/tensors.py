"""Tensors between layers, by the layers' positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.model.layer_graph import LayerGraph


@dataclass(frozen=True)
class CutTensor:
    """A tensor that a cut has to send.

    Attributes:
        producer: the layer that makes it.
        users: the layers that use it, ascending.
        saver: the layer that keeps it for its backward, if one does.
        bytes: of the activation, in the mean over lengths of microbatches: as time needs it, and
            no more than memory does.
        gradient_bytes: sent back; 0 if it needs no gradient.
    """

    producer: int
    users: tuple[int, ...]
    saver: int | None
    bytes: int
    gradient_bytes: int


def cut_tensors(graph: LayerGraph) -> tuple[CutTensor, ...]:
    """Return the tensors of a layer graph that have any bytes."""
    position = {name: index for index, name in enumerate(graph.layers)}
    return tuple(
        CutTensor(
            producer=position[tensor.producer],
            users=tuple(sorted(position[user] for user in tensor.users)),
            saver=None if tensor.saved_by is None else position[tensor.saved_by],
            bytes=tensor.message_bytes,
            gradient_bytes=tensor.message_bytes if tensor.requires_grad else 0,
        )
        for tensor in graph.record.boundaries
        if tensor.bytes
    )


SCALE = 2**20
"""Fixed-point denominator of ticks a unit."""
LARGEST = 2**59
"""CP-SAT refuses sums that could leave 64 bits; this is far beyond every horizon."""
MOST_UNITS = 2**24
"""Bytes are counted in units so large that no more than this many are needed."""


@dataclass(frozen=True)
class ByteUnit:
    """So many bytes; sums are rounded down to it term by term."""

    bytes: int

    @classmethod
    def for_total(cls, total_bytes: int, most_units: int = MOST_UNITS) -> ByteUnit:
        """Return the smallest power of two of which the total has no more than ``most_units``."""
        return cls(1 << max(0, (total_bytes // most_units).bit_length()))

    def floor(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes in units, rounded down."""
        return [int(size) // self.bytes for size in sizes]


def fixed_point(ticks: float, times: int = 1) -> int:
    """Return fixed point, rounded down; cut off where ``times`` as much would overflow."""
    return min(math.floor(ticks * SCALE), LARGEST // max(times, 1))
