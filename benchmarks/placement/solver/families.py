"""Contiguous splits found in small families of ideals around promising ones."""

from __future__ import annotations

import numpy as np

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.chain_search import Chain, best_chain, is_searchable
from benchmarks.placement.solver.ideals import Family, distinct, neighbours, prefixes
from benchmarks.placement.solver.orders import linear_orders
from planner.search.budget import Clock

ORDERS = 20
MOST_CELLS = 3e7
"""Ideals times blocks of a family: what a search of about a second takes."""
ROUNDS = 20


def good_chain(blocks: Blocks, below: int, seed: int, clock: Clock) -> Chain | None:
    """Return a split with loads below a limit; None if none is found.

    First the best among the prefixes of some linear orders together (it may change from one order
    to another wherever two prefixes are part of each other), then again and again with the
    ideals near the borders of its stages.
    """
    if not is_searchable(blocks):
        return None
    count = int(np.clip(MOST_CELLS // blocks.size**2, 2, ORDERS))
    orders = linear_orders(blocks, count, seed)
    family = distinct(np.concatenate([prefixes(order) for order in orders]))
    best: Chain | None = None
    try:
        found = best_chain(blocks, family, below, clock)
        for _ in range(ROUNDS):
            if found is None:
                break
            best = found
            near = _near(blocks, best)
            if near.size > MOST_CELLS:
                break
            family = distinct(np.concatenate([family, near]))
            found = best_chain(blocks, family, best.value, clock)
    except TimeoutError:
        pass
    return best


def _near(blocks: Blocks, chain: Chain) -> Family:
    """The ideals at most two blocks away from a border of the split."""
    borders = [np.zeros(blocks.size, dtype=bool)]
    for _, stage in chain.stages:
        borders.append(borders[-1] | stage)
    near: Family = np.array(borders)
    for _ in range(2):
        near = distinct(np.concatenate([near, neighbours(blocks, near)]))
    return near
