"""Min-max dynamic program over a row of devices: stages are intervals, replicas are neighbours.

The recursion of PipeDream (Narayanan et al. 2019, section 3.1) and of SPP's PRM (Luo et al. 2022),
for every number of stages, from the last stage to the first so that the number of stages after a
stage, and with it the microbatches in flight, is known. What a stage and a channel cost is the
caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.search.partition.chain import FloatArray, IntArray

MAX_REPLICA_CHOICES = 16
"""Beyond this many devices only powers of two and all are tried as replica counts, by default."""


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
        """Return the cost of layers [i, j) on ``replicas`` positions from ``first`` on, a matrix.

        ``after`` stages follow. Infinite where j <= i.
        """

    def channel_s(self, first: int, replicas: int, next_replicas: int) -> FloatArray:
        """Return the cost at each cut, 0 to ``layers``, of transfers to the next stage."""


class StageSpan(NamedTuple):
    """A stage: layers ``begin`` to ``end`` on ``replicas`` positions from ``first`` on."""

    begin: int
    end: int
    first: int
    replicas: int


class Within(NamedTuple):
    """What bottlenecks are of interest; others need not be worked out.

    Attributes:
        limit_s: bottlenecks below this.
        before_s: by number of positions and then by cut, a time that no stages in front of the cut
            beat on so many positions.
    """

    limit_s: float
    before_s: Callable[[int], FloatArray]


class MinMaxTable:
    """``best[n][r, k, i]``: least bottleneck of layers i.. in n stages from position k on.

    The front stage has the r-th replica count. Positions in front of the first stage and after
    the last one may stay unused.

    Args:
        costs: of stages and channels.
        within: leaves out what cannot be part of a solution below a limit: infinity stands for it.
    """

    def __init__(self, costs: IntervalCosts, within: Within | None = None) -> None:
        self.costs = costs
        self._within = within
        shape = (len(costs.replica_counts), costs.positions + 1, costs.layers + 1)
        empty = np.full(shape, np.inf)
        empty[:, :, costs.layers] = 0.0
        self.best = [empty]
        self._ends: list[IntArray] = []
        self._nexts: list[NDArray[np.int8]] = []
        self._channels: dict[tuple[int, int, int], FloatArray] = {}

    def add_stage(self) -> None:
        """Extend the table by one more stage in front."""
        before, after = self.best[-1], len(self.best) - 1
        best = np.full_like(before, np.inf)
        ends = np.zeros(before.shape, dtype=np.int64)
        nexts = np.zeros(before.shape, dtype=np.int8)
        begins = self.costs.layers - after  # Every stage after needs a layer of its own.
        alive = np.isfinite(before).any(axis=2)
        for index, replicas in enumerate(self.costs.replica_counts if begins > 0 else ()):
            for first in range(self.costs.positions - replicas + 1):
                followers = np.flatnonzero(alive[:, first + replicas])
                if not len(followers):
                    continue
                rest, follower = self._rest(first, replicas, before, followers)
                fronts, cuts = self._window(first, rest[: begins + 1])
                if fronts.stop <= fronts.start:
                    continue
                stage = self.costs.stage_s(first, replicas, after)[fronts, cuts]
                total = np.maximum(stage, rest[None, cuts])
                end = total.argmin(axis=1)
                best[index, first, fronts] = total[np.arange(len(total)), end]
                ends[index, first, fronts] = end + cuts.start
                nexts[index, first, fronts] = follower[end + cuts.start]
        self.best.append(best)
        self._ends.append(ends)
        self._nexts.append(nexts)

    def _window(self, first: int, rest: FloatArray) -> tuple[slice, slice]:
        """Return where the front stage may begin and end, if it lies on position ``first``.

        Args:
            first: its first position.
            rest: the least cost of what follows, by the cut at its end.
        """
        if self._within is None:
            return slice(0, len(rest) - 1), slice(1, len(rest))
        limit_s = self._within.limit_s
        cuts = np.flatnonzero(rest[1:] < limit_s) + 1
        if not len(cuts):
            return slice(0, 0), slice(1, 1)
        fronts = np.flatnonzero(self._within.before_s(first)[: cuts[-1]] < limit_s)
        if not len(fronts):
            return slice(0, 0), slice(1, 1)
        return slice(int(fronts[0]), int(fronts[-1]) + 1), slice(int(cuts[0]), int(cuts[-1]) + 1)

    def _rest(
        self, first: int, replicas: int, before: FloatArray, followers: IntArray
    ) -> tuple[FloatArray, IntArray]:
        """Return least cost of what follows at each cut, and the next stage's replica choice.

        Args:
            first: the front stage's first position.
            replicas: its positions.
            before: the table of what follows.
            followers: replica choices of the next stage with any solution.
        """
        at = before[followers, first + replicas, :]
        if len(self.best) == 1:
            return at[0], np.zeros(at.shape[1], dtype=np.int64)
        channels = [self._channel(first, replicas, choice) for choice in followers.tolist()]
        total = np.maximum(at, channels)
        follower = total.argmin(axis=0)
        return total[follower, np.arange(total.shape[1])], followers[follower]

    def _channel(self, first: int, replicas: int, choice: int) -> FloatArray:
        """Return channel costs to a next stage of this replica choice, by cut."""
        key = (first, replicas, choice)
        if key not in self._channels:
            count = self.costs.replica_counts[choice]
            self._channels[key] = self.costs.channel_s(first, replicas, count)
        return self._channels[key]

    def bottleneck_s(self, stages: int) -> float:
        """Return the least bottleneck of all layers in so many stages; infinite if none fit."""
        return float(self.best[stages][:, :, 0].min())

    def spans(self, stages: int) -> tuple[StageSpan, ...] | None:
        """Return the stages that reach it, first stage first; None if there is no way."""
        if not np.isfinite(self.bottleneck_s(stages)):
            return None
        front = self.best[stages][:, :, 0]
        choice, first = (int(x) for x in np.unravel_index(front.argmin(), front.shape))
        found, layer = [], 0
        for left in range(stages - 1, -1, -1):
            replicas = self.costs.replica_counts[choice]
            end = int(self._ends[left][choice, first, layer])
            found.append(StageSpan(layer, end, first, replicas))
            choice = int(self._nexts[left][choice, first, layer])
            first, layer = first + replicas, end
        return tuple(found)


def replica_counts(
    positions: int, replication: bool, most_choices: int = MAX_REPLICA_CHOICES
) -> tuple[int, ...]:
    """Return replica counts to try: all up to so many positions, beyond powers of two and all."""
    if not replication:
        return (1,)
    if positions <= most_choices:
        return tuple(range(1, positions + 1))
    powers = {2**power for power in range(positions.bit_length())}
    return tuple(sorted(powers | {positions}))
