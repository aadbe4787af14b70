"""Loads of stages as differences of two ideals, for many pairs at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.ideals import Family

Steps = NDArray[np.float64]
"""Loads in steps: whole numbers below 2**53, or infinity where a stage is impossible."""
Rows = NDArray[np.intp]
ROWS = 4096


class PairLoads:
    """The loads of the stages ``J - I`` of a family.

    Transfers: a net is paid unless the stage holds none or all of its pins. With a of its pins
    in I and b in J the stage holds none where a = b and all where a = 0 and b is their number: a
    function of two small numbers, and so a product of two matrices (one column a value of a).

    Args:
        blocks: the problem.
        family: ideals, one a row.
    """

    def __init__(self, blocks: Blocks, family: Family) -> None:
        self._blocks = blocks
        self._cost = np.array([net.cost for net in blocks.nets], dtype=np.float64)
        self._pins = np.array([len(net.pins) for net in blocks.nets], dtype=np.int32)
        self._held = _held_pins(blocks, family)
        self._chains = _chain_counts(blocks, family)
        self._times = [_sums(family, row) for row in blocks.times]
        self._memory = _sums(family, blocks.memory)
        self._forbidden = [_sums(family, [not may for may in row]) for row in blocks.allowed]

    @property
    def cut(self) -> Steps:
        """Return for each ideal the cost of the nets across its border."""
        sums = np.empty(len(self._held))
        for rows in _slices(len(self._held)):
            is_cut = (self._held[rows] > 0) & (self._held[rows] < self._pins)
            sums[rows] = is_cut.astype(np.float64) @ self._cost
        return sums

    def between(self, lower: Rows, upper: Rows) -> list[Steps]:
        """Loads by class, each of shape ``(len(lower), len(upper))``.

        Infinite where the lower ideal is no part of the upper one, where a block is not allowed
        on the class, or where a device's memory is too small.
        """
        apart = np.zeros((len(lower), len(upper)), dtype=bool)
        for chain in self._chains:
            apart |= chain[lower][:, None] > chain[upper][None, :]
        transfers = self._transfers(lower, upper)
        return [self._of_class(number, lower, upper, apart, transfers) for number in self._present]

    @property
    def _present(self) -> range:
        return range(len(self._blocks.classes))

    def _of_class(
        self, number: int, lower: Rows, upper: Rows, apart: NDArray[np.bool_], transfers: Steps
    ) -> Steps:
        loads = self._times[number][upper][None, :] - self._times[number][lower][:, None]
        if self._blocks.classes[number].pays_transfers:
            loads = loads + transfers
        memory = self._memory[upper][None, :] - self._memory[lower][:, None]
        forbidden = self._forbidden[number]
        impossible = apart | (memory > self._blocks.limits[number])
        if forbidden.any():
            impossible |= forbidden[upper][None, :] > forbidden[lower][:, None]
        return np.where(impossible, np.inf, loads)

    def _transfers(self, lower: Rows, upper: Rows) -> Steps:
        low, high = self._held[lower], self._held[upper]
        # Nets wholly outside every upper or wholly inside every lower ideal are never paid.
        active = np.flatnonzero((high > 0).any(axis=0) & (low < self._pins).any(axis=0))
        low, high = low[:, active], high[:, active]
        cost, pins = self._cost[active], self._pins[active]
        from_none = (high == 0) | (high == pins)
        left, right = [], []
        for held in range(1, int(low.max(initial=0)) + 1):
            columns = np.flatnonzero((low == held).any(axis=0))
            same = (high[:, columns] == held).astype(np.float64) - from_none[:, columns]
            left.append((low[:, columns] == held).astype(np.float64))
            right.append(same * cost[columns])
        paid_from_none = cost.sum() - from_none.astype(np.float64) @ cost
        if not left:
            return np.tile(paid_from_none, (len(lower), 1))
        saved = np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
        transfers: Steps = paid_from_none[None, :] - saved
        return transfers


def row_sums(family: Family, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the exact sum of block values of each ideal."""
    sums = [family[rows].astype(np.int64) @ values for rows in _slices(len(family))]
    return np.concatenate(sums) if sums else np.zeros(0, dtype=np.int64)


def _sums(family: Family, values: Iterable[int]) -> Steps:
    return row_sums(family, np.array(list(values), dtype=np.int64)).astype(np.float64)


def _held_pins(blocks: Blocks, family: Family) -> NDArray[np.uint16]:
    """Return the number of each net's pins in each ideal, shape ``(ideals, nets)``."""
    incidence = np.zeros((blocks.size, len(blocks.nets)), dtype=np.float32)
    for number, net in enumerate(blocks.nets):
        incidence[list(net.pins), number] = 1
    held = np.empty((len(family), len(blocks.nets)), dtype=np.uint16)
    for rows in _slices(len(family)):
        held[rows] = family[rows].astype(np.float32) @ incidence
    return held


def _slices(count: int) -> Iterator[slice]:
    """Rows a few thousand at a time: wider types of all at once would take gigabytes."""
    return (slice(start, start + ROWS) for start in range(0, count, ROWS))


def _chain_counts(blocks: Blocks, family: Family) -> list[NDArray[np.uint16]]:
    """Return how many blocks of each covering chain each ideal holds.

    An ideal holds a prefix of a chain, so one ideal is part of another exactly if it holds no more
    of any chain.
    """
    order = nx.DiGraph()
    order.add_nodes_from(range(blocks.size))
    order.add_edges_from(blocks.precedences)
    left = order.copy()
    chains = []
    while left:
        chain = nx.dag_longest_path(left)
        left.remove_nodes_from(chain)
        chains.append(family[:, chain].sum(axis=1).astype(np.uint16))
    return chains
