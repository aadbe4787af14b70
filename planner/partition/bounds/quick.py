"""planner.partition.bounds.schedule_bound_s for one stage a device, quickly and over and over.

Stages are looked up in matrices over intervals, and what was worked out for a stage or a channel
is kept, so that a small change of a partition costs little. Parameters tied between stages are
left out: a partition that is to be used is scored again by the bound itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.artifacts.link_table import LinkTable
from planner.costs.collectives import fewest_steps
from planner.partition.bounds.schedule import fastest_split
from planner.partition.chain import Partition, StageChoice
from planner.partition.intervals import Intervals


class NumberedStage(NamedTuple):
    """A stage between two cuts, by their indices, on devices, by their numbers, ascending."""

    begin: int
    end: int
    devices: tuple[int, ...]


Numbered = tuple[NumberedStage, ...]


class Score(NamedTuple):
    """What a partition is worth.

    Attributes:
        bound_s: no schedule of it is faster.
        excess_s: by how much the stages come near the bound, in all; less is better to go on from.
        critical: the stage that sets the bound.
    """

    bound_s: float
    excess_s: float
    critical: int


class _Stage(NamedTuple):
    load_s: float
    forward_s: float
    backward_s: float
    end_s: float


MOST_KEPT = 20_000
"""Stages kept at a time, with their channels and reductions."""
NEAR = 0.97
"""Stages beyond this share of the bound are counted in the excess."""


class QuickBound:
    """Scores partitions of one problem.

    Args:
        intervals: of the chain.
        links: of the cluster.
    """

    def __init__(self, intervals: Intervals, links: LinkTable) -> None:
        self.intervals = intervals
        self.links = links
        self.kinds = intervals.chain.kinds
        self._stages: dict[NumberedStage, _Stage] = {}
        self._channels: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
        self._reductions: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def score(self, partition: Sequence[NumberedStage]) -> Score:
        """The bound, and how near the stages come to it."""
        figures = [self._stage(stage) for stage in partition]
        channels = [
            self._channel(second.begin, first.devices, second.devices)
            for first, second in pairwise(partition)
        ]
        times = self._stage_bounds(figures, channels)
        times += self._channel_bounds(partition, figures, channels)
        bound = max(times)
        excess = sum(max(0.0, time - NEAR * bound) for time in times)
        critical = times.index(bound)
        return Score(bound, excess, critical % len(partition))

    def numbered(self, partition: Partition) -> Numbered | None:
        """The stages by numbers; None if some cut is not among the intervals'."""
        index, numbers = self._index, self.intervals.chain.problem.cluster.numbers
        if any(stage.end not in index for stage in partition):
            return None
        return tuple(
            NumberedStage(
                index[stage.begin],
                index[stage.end],
                tuple(sorted(numbers[device] for device in stage.devices)),
            )
            for stage in partition
        )

    @cached_property
    def _index(self) -> dict[int, int]:
        return {int(cut): number for number, cut in enumerate(self.intervals.cuts)}

    def named(self, stages: Numbered) -> Partition:
        """The stages by positions in the chain and names of devices."""
        names, cuts = self.intervals.chain.problem.cluster.device_names, self.intervals.cuts
        return tuple(
            StageChoice(
                int(cuts[stage.begin]),
                int(cuts[stage.end]),
                tuple(names[device] for device in stage.devices),
            )
            for stage in stages
        )

    def _stage_bounds(
        self, figures: list[_Stage], channels: list[tuple[float, float]]
    ) -> list[float]:
        """Head, load and way back of every stage."""
        times, head, way = [], 0.0, 0.0
        for figure, (there, back) in zip(figures, [*channels, (0.0, 0.0)], strict=True):
            home = max(way, figure.end_s)
            times.append(head + figure.load_s + home)
            head += figure.forward_s + there
            way = home + figure.backward_s + back
        return times

    def _channel_bounds(
        self,
        partition: Sequence[NumberedStage],
        figures: list[_Stage],
        channels: list[tuple[float, float]],
    ) -> list[float]:
        """Every microbatch over a channel between two single devices, then the rest of the way."""
        if not self.links.is_exclusive:
            return []
        path = [figure.forward_s + figure.backward_s for figure in figures]
        below = [0.0] * (len(figures) + 1)
        for place in reversed(range(len(figures))):
            send = sum(channels[place]) if place < len(channels) else 0.0
            below[place] = path[place] + send + below[place + 1]
        times, above, way = [], 0.0, 0.0
        for place, (there, back) in enumerate(channels):
            way = max(way, figures[place].end_s)
            if len(partition[place].devices) == len(partition[place + 1].devices) == 1:
                busy = self.intervals.microbatches * max(there, back) + min(there, back)
                times.append(above + way + path[place] + busy + below[place + 1])
            else:
                times.append(0.0)
            above += figures[place].forward_s + there
            way += figures[place].backward_s + back
        return times

    def _stage(self, stage: NumberedStage) -> _Stage:
        if stage not in self._stages:
            if len(self._stages) >= MOST_KEPT:
                self._stages.clear()
                self._channels.clear()
                self._reductions.clear()
            self._stages[stage] = self._work_out(stage)
        return self._stages[stage]

    def _work_out(self, stage: NumberedStage) -> _Stage:
        table, place = self.intervals, (stage.begin, stage.end)
        counts = [0] * len(table.types)
        for device in stage.devices:
            counts[self.kinds[device]] += 1
        held = [k for k, count in enumerate(counts) if count]
        room = min(float(table.types[k].capacity_bytes) for k in held)
        if table.static_bytes[place] + table.least_stash_bytes[place] > room:
            return _Stage(np.inf, 0.0, 0.0, 0.0)
        replicas: Counter[float] = Counter()
        for k in held:
            replicas[float(table.forward_s[k][place] + table.backward_s[k][place])] += counts[k]
        widest = max(table.types[k].memory_bandwidth_gb_per_s for k in held)
        step = float(table.optimizer_traffic_bytes[place]) / (widest * 1e9)
        return _Stage(
            load_s=fastest_split(replicas, table.microbatches),
            forward_s=min(float(table.forward_s[k][place]) for k in held),
            backward_s=min(float(table.backward_s[k][place]) for k in held),
            end_s=step + self._reduce_s(stage.devices, float(table.gradient_bytes[place])),
        )

    def _reduce_s(self, devices: tuple[int, ...], bytes_: float) -> float:
        count = len(devices)
        if count < 2 or bytes_ == 0:
            return 0.0
        if devices not in self._reductions:
            steps, moved = fewest_steps(count), 2 * (count - 1) / count
            self._reductions[devices] = [
                (steps * step.latency_s, moved * step.s_per_byte)
                for step in self.links.reduction(devices)
            ]
        return max(start + each * bytes_ for start, each in self._reductions[devices])

    def _channel(
        self, cut: int, here: tuple[int, ...], there: tuple[int, ...]
    ) -> tuple[float, float]:
        """Seconds forward and back over the best pair of devices."""
        key = (cut, here, there)
        if key not in self._channels:
            block = np.ix_(here, there)
            latency_s, s_per_byte = self.links.latency_s[block], self.links.s_per_byte[block]
            forward, backward = (
                float((latency_s + bytes_[cut] * s_per_byte).min()) if bytes_[cut] else 0.0
                for bytes_ in self.intervals.crossing_bytes
            )
            self._channels[key] = forward, backward
        return self._channels[key]
