"""Linear orders of the blocks, to start from: good splits are near the prefixes of some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from planner.partition.loads.blocks import Blocks


def linear_orders(blocks: Blocks, count: int, seed: int) -> Iterator[list[int]]:
    """Orders that respect the precedences: depth first, breadth first, then random ones of both."""
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
