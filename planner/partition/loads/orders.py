"""Linear orders of the blocks, to start from: good splits are near the prefixes of some of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from planner.partition.loads.blocks import Blocks

Pick = Callable[[list[int]], int]
"""Takes the next block out of those that are ready."""


def linear_orders(blocks: Blocks, count: int, seed: int) -> Iterator[list[int]]:
    """Orders that respect the precedences: depth first, breadth first, then random ones of both."""
    draw = random.Random(seed)
    yield _order(blocks, lambda ready: ready.pop(), None)
    yield _order(blocks, lambda ready: ready.pop(0), None)
    for number in range(count - 2):
        deep = number % 2 == 0
        yield _order(blocks, lambda ready, deep=deep: _drawn(ready, deep, draw), draw)


def _drawn(ready: list[int], deep: bool, draw: random.Random) -> int:
    return ready.pop(-1 if deep else draw.randrange(len(ready)))


def _order(blocks: Blocks, pick: Pick, draw: random.Random | None) -> list[int]:
    waits_for = [len(found) for found in blocks.predecessors]
    ready = [block for block in range(blocks.size) if not waits_for[block]]
    order = []
    while ready:
        block = pick(ready)
        order.append(block)
        after = list(blocks.successors[block])
        if draw:
            draw.shuffle(after)
        for successor in after:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)
    return order
