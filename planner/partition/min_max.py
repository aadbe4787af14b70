"""Min-max dynamic program over a row of devices: stages are intervals, replicas are neighbours.

The recursion of PipeDream (Narayanan et al. 2019, section 3.1) and of SPP's PRM (Luo et al. 2022),
for every number of stages, from the last stage to the first so that the number of stages after a
stage, and with it the microbatches in flight, is known. What a stage and a channel cost is the
caller's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.partition.chain import FloatArray, IntArray

MAX_REPLICA_CHOICES = 16
"""Beyond this many devices only powers of two and all are tried as replica counts."""


class IntervalCosts(Protocol):
    """Costs of stages and channels along a row of devices (or of equal blocks of devices).

    Every cost is of a whole iteration, in seconds, and at least 0; infinite where impossible.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def positions(self) -> int:
        """Number of devices in the row."""

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """How many neighbours a stage may lie on, ascending."""

    def stage_s(self, first: int, replicas: int, after: int) -> FloatArray:
        """Cost of layers [i, j) on positions ``first`` to ``first + replicas``: a square matrix.

        ``after`` stages follow. Infinite where j <= i.
        """

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> FloatArray:
        """Cost at each cut, 0 to ``layers``, of the way from such a stage to the next one."""


class Span(NamedTuple):
    """A stage: layers ``begin`` to ``end`` on ``replicas`` positions from ``first`` on."""

    begin: int
    end: int
    first: int
    replicas: int


class MinMaxTable:
    """``best[n][r, k, i]``: least bottleneck of layers i.. in n stages from position k on.

    The front stage has the r-th replica count. Positions in front of the first stage and behind
    the last one may stay unused.
    """

    def __init__(self, costs: IntervalCosts) -> None:
        self.costs = costs
        shape = (len(costs.replica_counts), costs.positions + 1, costs.layers + 1)
        empty = np.full(shape, np.inf)
        empty[:, :, costs.layers] = 0.0
        self.best = [empty]
        self._ends: list[IntArray] = []
        self._nexts: list[NDArray[np.int8]] = []
        self._channels: dict[tuple[int, int], FloatArray] = {}

    def add_stage(self) -> None:
        """Extend the table by one more stage in front."""
        before, after = self.best[-1], len(self.best) - 1
        best = np.full_like(before, np.inf)
        ends = np.zeros(before.shape, dtype=np.int64)
        nexts = np.zeros(before.shape, dtype=np.int8)
        begins = self.costs.layers - after  # Every stage after needs a layer of its own.
        for index, replicas in enumerate(self.costs.replica_counts if begins > 0 else ()):
            for first in range(self.costs.positions - replicas + 1):
                rest, follower = self._rest(first, replicas, before)
                stage = self.costs.stage_s(first, replicas, after)[:begins, 1 : begins + 1]
                total = np.maximum(stage, rest[None, 1 : begins + 1])
                end = total.argmin(axis=1)
                best[index, first, :begins] = total[np.arange(begins), end]
                ends[index, first, :begins] = end + 1
                nexts[index, first, :begins] = follower[end + 1]
        self.best.append(best)
        self._ends.append(ends)
        self._nexts.append(nexts)

    def _rest(
        self, first: int, replicas: int, before: FloatArray
    ) -> tuple[FloatArray, NDArray[np.int8]]:
        """Least cost of what follows at each cut, and the next stage's replica choice."""
        at = before[:, first + replicas, :]
        if len(self.best) == 1:
            return at[0], np.zeros(at.shape[1], dtype=np.int8)
        total = np.maximum(at, self._channel(first, replicas))
        follower = total.argmin(axis=0)
        return total[follower, np.arange(total.shape[1])], follower.astype(np.int8)

    def _channel(self, first: int, replicas: int) -> FloatArray:
        """Channel costs by replica choice of the next stage and by cut."""
        key = (first, replicas)
        if key not in self._channels:
            costs = self.costs
            rows = [
                costs.channel_s(first, replicas, count)
                if first + replicas + count <= costs.positions
                else np.full(costs.layers + 1, np.inf)
                for count in costs.replica_counts
            ]
            self._channels[key] = np.array(rows)
        return self._channels[key]

    def bottleneck_s(self, stages: int) -> float:
        """The least bottleneck of all layers in so many stages; infinite if there is no way."""
        return float(self.best[stages][:, :, 0].min())

    def spans(self, stages: int) -> tuple[Span, ...] | None:
        """The stages that reach it, first stage first; None if there is no way."""
        if not np.isfinite(self.bottleneck_s(stages)):
            return None
        front = self.best[stages][:, :, 0]
        choice, first = (int(x) for x in np.unravel_index(front.argmin(), front.shape))
        found, layer = [], 0
        for left in range(stages - 1, -1, -1):
            replicas = self.costs.replica_counts[choice]
            end = int(self._ends[left][choice, first, layer])
            found.append(Span(layer, end, first, replicas))
            choice = int(self._nexts[left][choice, first, layer])
            first, layer = first + replicas, end
        return tuple(found)


def replica_counts(positions: int, replication: bool) -> tuple[int, ...]:
    """The replica counts to try: all up to 16 positions, beyond that powers of two and all."""
    if not replication:
        return (1,)
    if positions <= MAX_REPLICA_CHOICES:
        return tuple(range(1, positions + 1))
    powers = {2**power for power in range(positions.bit_length())}
    return tuple(sorted(powers | {positions}))
