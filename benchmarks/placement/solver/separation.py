"""Blocks that no placement below a limit can separate (minimum cuts), and their bound."""

from __future__ import annotations

import numpy as np
from ortools.graph.python import max_flow

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.bounds import average_bound, pigeonhole_bound, unplaceable
from benchmarks.placement.solver.reduction import joined_below
from planner.search.budget import Clock

ENDLESS = 2**50
RELATIVE_PRECISION = 2**-12
SECONDS_PER_CUT = 5e-4
"""Deterministic time booked for one minimum cut."""


def destructive_bound(blocks: Blocks, low: int, high: int, clock: Clock) -> int:
    """Return a lower bound on the load: the least limit that is not refuted.

    A limit is refuted if :func:`tightened` finds a contradiction (Klein and Scholl 1999,
    "Computing lower bounds by destructive improvement").

    Args:
        blocks: the problem.
        low: a bound already known.
        high: no limit above it is tried, such as the best load known.
        clock: when to stop.
    """
    while high - low > max(1, int(low * RELATIVE_PRECISION)) and clock.left_s > 0:
        middle = (low + high) // 2
        if tightened(blocks, middle, clock) is None:
            low = middle + 1
        else:
            high = middle
    return low


def tightened(blocks: Blocks, most: int, clock: Clock) -> Blocks | None:
    """The blocks with those joined that no placement with loads up to ``most`` separates.

    Two blocks are separated only if on one side at least a device holds one of them, not the
    other, and pays its transfers, with a load up to the limit; the least such load, whatever else
    the device holds, is a minimum cut. (Or a device that pays nothing holds one of them.)

    Returns:
        The joined blocks, or None if no placement has loads up to the limit.
    """
    while True:
        blocks = joined_below(blocks, most)
        if unplaceable(blocks, most):
            return None
        if max(average_bound(blocks), pigeonhole_bound(blocks)) > most:
            return None
        cuts = _Cuts(blocks, most, clock)
        if clock.left_s <= 0:
            return blocks
        if not all(cuts.can_be_placed(block) for block in range(blocks.size)):
            return None
        pairs = [
            (net.pins[0], pin)
            for net in blocks.nets
            for pin in net.pins[1:]
            if not cuts.can_be_separated(net.pins[0], pin)
        ]
        if not pairs:
            return blocks
        blocks = blocks.joined(pairs)


class _Cuts:
    """Least loads of a device that holds one block and, if told so, not another.

    The network: a device's load is the capacity of the arcs from what it holds to what it does not.
    Every block has an arc of its least time to the sink; every net two vertices with an arc of
    its cost between them, which is crossed unless its pins are all on one side.
    """

    def __init__(self, blocks: Blocks, most: int, clock: Clock) -> None:
        self._blocks, self._most, self._clock = blocks, most, clock
        self._times = [self._least(block, True) for block in range(blocks.size)]
        self._fits_free = [self._least(b, False) <= most for b in range(blocks.size)]
        self._free_devices = sum(k.count for k in blocks.classes if not k.pays_transfers)
        self._source = blocks.size + 2 * len(blocks.nets)
        self._sink = self._source + 1
        self._flow = self._network()
        self._known: dict[tuple[int, int | None], bool] = {}

    def _least(self, block: int, pays: bool) -> int:
        """The least time of a block on classes that pay transfers, or on those that do not."""
        blocks = self._blocks
        times = [
            row[block]
            for kind, row, allowed in zip(blocks.classes, blocks.times, blocks.allowed, strict=True)
            if kind.count and kind.pays_transfers == pays and allowed[block]
        ]
        return min(times, default=ENDLESS)

    def _network(self) -> max_flow.SimpleMaxFlow:
        """Arcs block to sink first, then source to block, then those of the nets."""
        size = self._blocks.size
        arcs = [(block, self._sink, self._times[block]) for block in range(size)]
        arcs += [(self._source, block, 0) for block in range(size)]
        for number, net in enumerate(self._blocks.nets):
            enters = size + 2 * number
            arcs.append((enters, enters + 1, net.cost))
            for pin in net.pins:
                arcs += [(pin, enters, ENDLESS), (enters + 1, pin, ENDLESS)]
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(*(np.array(column) for column in zip(*arcs, strict=True)))
        return flow

    def can_be_placed(self, block: int) -> bool:
        """Return whether some device can hold a block within the limit."""
        return self._fits_free[block] or self._fits_paying(block, None)

    def can_be_separated(self, first: int, second: int) -> bool:
        """Return whether two blocks can be on two devices within the limit."""
        free = [self._fits_free[first], self._fits_free[second]]
        if self._free_devices > 1 and all(free):
            return True
        paying = self._fits_paying(first, second)
        if paying and free[1]:
            return True
        return (paying or free[0]) and self._fits_paying(second, first)

    def _fits_paying(self, inside: int, outside: int | None) -> bool:
        """Return whether a device that pays transfers can hold one block but not another."""
        key = (inside, outside)
        if key not in self._known:
            # Without time left nothing is refuted.
            out_of_time = self._clock.left_s <= 0
            self._known[key] = out_of_time or self._least_load(inside, outside) <= self._most
        return self._known[key]

    def _least_load(self, inside: int, outside: int | None) -> int:
        self._flow.set_arc_capacity(self._blocks.size + inside, ENDLESS)
        if outside is not None:
            self._flow.set_arc_capacity(outside, ENDLESS)
        self._clock.spend(SECONDS_PER_CUT)
        status = self._flow.solve(self._source, self._sink)
        assert status == self._flow.OPTIMAL, status
        load = int(self._flow.optimal_flow())
        self._flow.set_arc_capacity(self._blocks.size + inside, 0)
        if outside is not None:
            self._flow.set_arc_capacity(outside, self._times[outside])
        return load
