"""What no other beats in everything: the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(costs: Sequence[Sequence[float]]) -> frozenset[int]:
    """Indices of the rows that no other row dominates.

    A row dominates another if it is nowhere greater and somewhere less. Equal rows do not dominate
    each other.

    Args:
        costs: rows of equally many numbers; less is better in each.
    """
    front: list[int] = []
    # What dominates a row comes before it in lexicographic order, and so does what is on the front
    # and dominates it too.
    for index in sorted(range(len(costs)), key=lambda i: tuple(costs[i])):
        if not any(_dominates(costs[other], costs[index]) for other in front):
            front.append(index)
    return frozenset(front)


def _dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
