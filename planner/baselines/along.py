"""Stages along a row of devices with the shortest longest stage or channel.

The recursion of PipeDream (Narayanan et al. 2019, section 3.1) and of SPP's PRM (Luo et al. 2022),

    W(l, n, r, i) = min over l', r' of max(W(l', n - 1, r', i - r), channel at the cut, stage),

for every number of stages n, where stages are neighbours in the row. It runs from the last stage
to the first, so that the number of stages behind a stage, and with it the microbatches in flight,
is known; devices at both ends of the row may stay unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.baselines.layers import Floats, Stages
from planner.baselines.stage_costs import Block, StageCosts, devices_of, replica_counts

Combine = Callable[[Floats, Floats], Floats]
"""The cost of a stage, of the seconds of its work and of its all-reduce."""


class _Choice(NamedTuple):
    """Of stages with some number behind them: where each ends, and how wide the next is."""

    ends: NDArray[np.int16]
    nexts: NDArray[np.int8]


class Row:
    """The dynamic program over a row of blocks of devices.

    Args:
        costs: of stages on blocks, in the order of the row.
        combine: what a stage costs.

    Attributes:
        limit_s: bottlenecks of so much or more are of no interest; whoever takes solutions may
            lower it in between.
    """

    def __init__(self, costs: StageCosts, combine: Combine) -> None:
        self._costs, self._combine, self.limit_s = costs, combine, math.inf
        self._blocks = costs.blocks
        self._count = costs.layers.problem.job.microbatches
        self._widths = replica_counts(len(self._blocks), costs.layers.problem.job.replication)
        self._stages_s: dict[tuple[int, int, int], Floats] = {}
        self._channels_s: dict[tuple[int, int, int], Floats] = {}

    def best(self) -> Iterator[tuple[float, Stages]]:
        """Yield the least bottleneck in seconds, and the stages, by number of stages from 1 on.

        Numbers of stages that do not fit are left out.
        """
        costs, places = self._costs, len(self._blocks)
        least = np.full((len(self._widths), places + 1, costs.length + 1), np.inf)
        least[:, :, -1] = 0.0
        choices: list[_Choice] = []
        for _ in range(min(costs.layers.max_stages, costs.length, places)):
            least, choice = self._with_one_more(least, len(choices))
            choices.append(choice)
            bottleneck_s = float(least[:, :, 0].min())
            if math.isfinite(bottleneck_s):
                yield bottleneck_s, self._stages(least[:, :, 0], choices)

    def _with_one_more(self, before: Floats, after: int) -> tuple[Floats, _Choice]:
        """Return the least bottlenecks with one more stage in front of ``after`` others."""
        least = np.full_like(before, np.inf)
        ends, nexts = np.zeros(before.shape, np.int16), np.zeros(before.shape, np.int8)
        last = self._costs.length - after  # Every stage behind needs a layer of its own.
        for index, width in enumerate(self._widths):
            for first in range(len(self._blocks) - width + 1):
                rest_s, follower = self._rest(first, width, before, after)
                cuts = np.flatnonzero(rest_s[1 : last + 1] < self.limit_s) + 1
                if not len(cuts):
                    continue
                stage_s = self._stage_s(first, width, after)[:last, cuts[0] : cuts[-1] + 1]
                total_s = np.maximum(stage_s, rest_s[cuts[0] : cuts[-1] + 1])
                end = total_s.argmin(axis=1)
                least[index, first, :last] = total_s[np.arange(last), end]
                ends[index, first, :last] = end + cuts[0]
                nexts[index, first, :last] = follower[end + cuts[0]]
        least[least >= self.limit_s] = np.inf
        return least, _Choice(ends, nexts)

    def _rest(
        self, first: int, width: int, before: Floats, after: int
    ) -> tuple[Floats, NDArray[np.intp]]:
        """Return the least cost behind each cut, and the choice of the next stage's width."""
        behind = before[:, first + width]
        if after == 0:
            return behind[0], np.zeros(behind.shape[1], dtype=np.intp)
        alive = np.flatnonzero(np.isfinite(behind).any(axis=1))
        if not len(alive):
            return behind[0], np.zeros(behind.shape[1], dtype=np.intp)
        channels = [self._channel_s(first, width, self._widths[index]) for index in alive]
        total_s = np.maximum(behind[alive], channels)
        follower = total_s.argmin(axis=0)
        return total_s[follower, np.arange(total_s.shape[1])], alive[follower]

    def _at(self, first: int, width: int) -> tuple[Block, ...]:
        return self._blocks[first : first + width]

    def _stage_s(self, first: int, width: int, after: int) -> Floats:
        """Return the cost of every interval as a stage; infinite where 1F1B does not fit."""
        blocks = self._at(first, width)
        flights = min(after, self._count)
        if (key := (first, width, flights)) not in self._stages_s:
            work_s = self._count * self._costs.work_s(blocks) + self._costs.fits(blocks, after + 1)
            alone = len(devices_of(blocks)) == 1
            reduce_s = np.zeros_like(work_s) if alone else self._costs.reduce_s(blocks)
            self._stages_s[key] = self._combine(work_s, reduce_s)
        return self._stages_s[key]

    def _channel_s(self, first: int, width: int, next_width: int) -> Floats:
        """Return all activations there and all gradients back, by cut."""
        if (key := (first, width, next_width)) not in self._channels_s:
            ends = self._at(first, width), self._at(first + width, next_width)
            both_s = self._costs.send_s(*ends) + self._costs.send_back_s(*ends)
            self._channels_s[key] = self._count * both_s
        return self._channels_s[key]

    def _stages(self, front: Floats, choices: Sequence[_Choice]) -> Stages:
        """Return the stages that reach the least bottleneck, first stage first."""
        index, first = (int(x) for x in np.unravel_index(front.argmin(), front.shape))
        found, begin = [], 0
        for choice in reversed(choices):
            end, width = int(choice.ends[index, first, begin]), self._widths[index]
            found.append(self._costs.stage(begin, end, self._at(first, width)))
            index = int(choice.nexts[index, first, begin])
            first, begin = first + width, end
        return tuple(found)
