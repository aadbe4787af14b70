"""Fewer blocks for graphs that are too large to search at full resolution."""

from __future__ import annotations

from itertools import pairwise

from planner.partition.loads.blocks import Blocks
from planner.partition.loads.orders import linear_orders


def coarsened(blocks: Blocks, most: int) -> Blocks:
    """At most about ``most`` blocks: neighbours in a depth-first order joined.

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
