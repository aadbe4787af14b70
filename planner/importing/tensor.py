"""What one node of a graph hands to others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """What one node hands to others.

    Attributes:
        producer: the node that makes it.
        users: the nodes that read it; at least one, none twice.
        bytes: its size.
        elements: its places in the producer's list of outputs.
    """

    producer: str
    users: tuple[str, ...]
    bytes: int
    elements: tuple[int, ...] = (0,)
