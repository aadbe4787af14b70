"""Linear orders of the blocks, whose prefixes are near good splits, and coarsening by them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.placement.solver.blocks import Blocks


def linear_orders(blocks: Blocks, count: int, seed: int) -> Iterator[list[int]]:
    """Yield topological orders: depth first, breadth first, then random ones of both."""
    draw = random.Random(seed)
    yield _order(blocks, -1, None)
    yield _order(blocks, 0, None)
    for number in range(count - 2):
        yield _order(blocks, None if number % 2 else -1, draw)


def _order(blocks: Blocks, pick: int | None, draw: random.Random | None) -> list[int]:
    """One order.

    Args:
        blocks: what is ordered.
        pick: which of the ready blocks comes next: the last, the first, or any.
        draw: mixes the blocks that become ready together; without it they keep their order.
    """
    waits_for = [len(found) for found in blocks.predecessors]
    ready = [block for block in range(blocks.size) if not waits_for[block]]
    order = []
    while ready:
        if pick is None and draw is not None:
            order.append(ready.pop(draw.randrange(len(ready))))
        else:
            order.append(ready.pop(pick or 0))
        after = list(blocks.successors[order[-1]])
        if draw is not None:
            draw.shuffle(after)
        for successor in after:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)
    return order


def coarsened(blocks: Blocks, most: int) -> Blocks:
    """Return about ``most`` blocks at most, by joining neighbours in a depth-first order.

    The blocks themselves if they are few enough. A placement of the coarse blocks is one of the
    fine ones; a bound of the coarse blocks is not one of the fine ones.
    """
    if blocks.size <= most:
        return blocks
    order = next(linear_orders(blocks, 2, 0))
    weights = [max(column) for column in zip(*blocks.times, strict=True)]
    share = 2 * sum(weights) / most
    length = 2 * blocks.size / most
    pairs, weight, held = [], float(weights[order[0]]), 1
    for before, after in pairwise(order):
        if weight + weights[after] <= share and held + 1 <= length:
            pairs.append((before, after))
            weight, held = weight + weights[after], held + 1
        else:
            weight, held = float(weights[after]), 1
    return blocks.joined(pairs)
