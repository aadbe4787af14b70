"""Which workers share a node."""

from __future__ import annotations

from collections.abc import Sequence

Nodes = tuple[tuple[int, ...], ...]
"""The workers of each node."""
USUAL = 4
"""Workers of a node in Ripples' own experiments."""


def nodes_of(workers: int, pipelines_per_node: int | None) -> Nodes:
    """Nodes of consecutive workers; the last may have fewer.

    Where nodes tell nothing, since there is one only or each has one worker, or are not known,
    nodes are made up: of 4 workers, or of 2 where there are fewer than 8.
    """
    size = pipelines_per_node or 1
    if size == 1 or size >= workers:
        size = USUAL if workers >= 2 * USUAL else 2
    return tuple(
        tuple(range(first, min(first + size, workers))) for first in range(0, workers, size)
    )


def node_by_worker(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """The number of everyone's node."""
    return {worker: number for number, node in enumerate(nodes) for worker in node}
