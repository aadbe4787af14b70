"""``schedule_bound_s`` for partitions with one stage a device, computed incrementally.

Stages are looked up in matrices over intervals, and what was worked out for a stage or a channel
is kept, so that a small change of a partition costs little. Parameters tied between stages are
left out: a partition that is to be used is scored again by the bound itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from planner.cluster.link_table import LinkTable, moving_s
from planner.costs.collectives import fewest_steps
from planner.search.partition.chain import FloatArray, Partition, StageChoice
from planner.search.partition.intervals import Counts, Intervals, exposed_s
from planner.search.partition.spans import SLACK, ReplicaSpan, least_span_s


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


class PartitionScorer(Protocol):
    """Scores partitions of one problem for local search."""

    @property
    def intervals(self) -> Intervals:
        """The figures of the chain; stages end at its cuts."""

    @property
    def links(self) -> LinkTable:
        """Those of the cluster."""

    @property
    def stages_per_device(self) -> int:
        """How many stages a device may hold."""

    def score(self, partition: Numbered) -> Score:
        """Return what a partition is worth."""

    def numbered(self, partition: Partition) -> Numbered | None:
        """Return the stages by numbers; None if some cut is not among the intervals'."""

    def named(self, stages: Numbered) -> Partition:
        """Return the stages by positions in the chain and names of devices."""


class _Shares(NamedTuple):
    """The work of a stage's replicas, and the longest span if nothing lay beyond the stage.

    Attributes:
        each_s: forward and (part of) backward of a microbatch, and how many replicas take so long.
        load_s: work of the most loaded replica under the best split; infinite if nothing fits.
        slack_s: what may lie beyond the stage without any replica's span becoming longer.
    """

    each_s: tuple[tuple[float, float, int], ...]
    load_s: float
    slack_s: float

    def span_s(self, beyond_s: float, count: int, short_s: float) -> float:
        """Return the longest span under the best split of so many microbatches.

        Or the load, if some split is shorter than ``short_s``.
        """
        wait_s = beyond_s - self.slack_s
        # Where nothing fits, no replicas are known; devices without a link wait for ever.
        if not self.each_s or wait_s <= 0 or self.load_s + wait_s <= short_s:
            return self.load_s
        if len(self.each_s) == 1:
            forward, backward, number = self.each_s[0]
            return ReplicaSpan(forward, backward, beyond_s).seconds(-(-count // number))
        replicas = {ReplicaSpan(f, b, beyond_s): number for f, b, number in self.each_s}
        return least_span_s(replicas, count, self.load_s)


class _Stage(NamedTuple):
    """The figures of a stage; gradients are those on their way, all of a whole backward.

    Attributes:
        through: forwards and gradients of the replicas.
        work: all their work.
        ending_s: the reduction and the optimizer step.
        forward_s, gradient_s: of a microbatch on the fastest replica.
        end_s: what follows the last gradient on the stage itself.
    """

    through: _Shares
    work: _Shares
    ending_s: float
    forward_s: float
    gradient_s: float
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

    Attributes:
        stages_per_device: in a partition that can be scored.
    """

    stages_per_device = 1

    def __init__(self, intervals: Intervals, links: LinkTable) -> None:
        self.intervals = intervals
        self.links = links
        self.kinds = intervals.chain.kinds
        self._stages: dict[NumberedStage, _Stage] = {}
        self._channels: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
        self._reductions: dict[tuple[int, ...], list[tuple[float, float]]] = {}

    def score(self, partition: Sequence[NumberedStage]) -> Score:
        """Return the bound, and how near the stages come to it."""
        figures = [self._stage(stage) for stage in partition]
        channels = [
            self.channel_s(second.begin, first.devices, second.devices)
            for first, second in pairwise(partition)
        ]
        times = self._stage_bounds(figures, channels)
        times += self._channel_bounds(partition, figures, channels)
        bound = max(times)
        excess = sum(max(0.0, time - NEAR * bound) for time in times)
        critical = times.index(bound)
        return Score(bound, excess, critical % len(partition))

    def numbered(self, partition: Partition) -> Numbered | None:
        """Return the stages by numbers; None if some cut is not among the intervals'."""
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
        """Return the stages by positions in the chain and names of devices."""
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
        """Return head, span and tail of every stage.

        Where waiting cannot make a stage the longest of all, the span is taken without it.
        """
        rows, head, way, below = [], 0.0, 0.0, _below(figures, channels)
        hops, splits = [*channels, (0.0, 0.0)], self.intervals.chain.splits
        for figure, (there, back), path in zip(figures, hops, below[1:], strict=True):
            tail, beyond = max(way, figure.end_s), there + back + path
            rows.append((head + tail, beyond, figure.through))
            if splits:
                rows.append((head + figure.ending_s, beyond, figure.work))
            head += figure.forward_s + there
            way = tail + figure.gradient_s + back
        least = max(around + shares.load_s for around, _, shares in rows)
        count = self.intervals.microbatches
        times = [
            around + shares.span_s(beyond, count, least - around) for around, beyond, shares in rows
        ]
        return list(map(max, times[::2], times[1::2])) if splits else times

    def _channel_bounds(
        self,
        partition: Sequence[NumberedStage],
        figures: list[_Stage],
        channels: list[tuple[float, float]],
    ) -> list[float]:
        """Every microbatch over a channel between two single devices, then the rest of the way."""
        if not self.links.is_exclusive:
            return []
        path = [figure.forward_s + figure.gradient_s for figure in figures]
        below = _below(figures, channels)
        times, above, way = [], 0.0, 0.0
        for place, (there, back) in enumerate(channels):
            way = max(way, figures[place].end_s)
            if len(partition[place].devices) == len(partition[place + 1].devices) == 1:
                busy = self.intervals.microbatches * max(there, back) + min(there, back)
                times.append(above + way + path[place] + busy + below[place + 1])
            else:
                times.append(0.0)
            above += figures[place].forward_s + there
            way += figures[place].gradient_s + back
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
        counts = self._counts(stage)
        held = [k for k, count in enumerate(counts) if count]
        room = min(float(table.types[k].capacity_bytes) for k in held)
        if table.static_bytes_on(counts, place) + table.least_stash_bytes[place] > room:
            never = _Shares((), np.inf, np.inf)
            return _Stage(never, never, 0.0, 0.0, 0.0, 0.0)
        widest = max(table.types[k].optimizer_gb_per_s for k in held)
        step = float(table.optimizer_traffic_bytes[place]) / (widest * 1e9)
        ending_s = step + self.reduction_s(stage)
        through = self._shares(table.gradient_s, counts, place)
        work = self._shares(table.backward_s, counts, place) if table.chain.splits else through
        return _Stage(
            through=through,
            work=work,
            ending_s=ending_s,
            forward_s=min(float(table.forward_s[k][place]) for k in held),
            gradient_s=min(float(table.gradient_s[k][place]) for k in held),
            end_s=min(float(table.weight_s[k][place]) for k in held) + ending_s,
        )

    def _shares(
        self, backward_s: Sequence[FloatArray], counts: Sequence[int], place: tuple[int, int]
    ) -> _Shares:
        """Return the replicas' forwards and (parts of) backwards."""
        replicas: Counter[ReplicaSpan] = Counter()
        for k, count in enumerate(counts):
            if count:
                forward_s = float(self.intervals.forward_s[k][place])
                replicas[ReplicaSpan(forward_s, float(backward_s[k][place]), 0.0)] += count
        count = self.intervals.microbatches
        load_s = least_span_s(replicas, count)
        # With nothing beyond it a span is work alone: what is left of the load may be waited for.
        waits = (
            load_s - _without_wait_s(span, span.most(load_s * SLACK, count)) for span in replicas
        )
        each_s = ((span.forward_s, span.backward_s, number) for span, number in replicas.items())
        return _Shares(tuple(each_s), load_s, max(0.0, min(waits)))

    def _counts(self, stage: NumberedStage) -> Counts:
        """Return how many devices of each type hold a stage."""
        held = Counter(self.kinds[device] for device in stage.devices)
        return tuple(held[k] for k in range(len(self.intervals.types)))

    def reduction_s(self, stage: NumberedStage) -> float:
        """Return what of the stage's all-reduce follows its last backward."""
        devices, count = stage.devices, len(stage.devices)
        if count < 2:
            return 0.0
        if devices not in self._reductions:
            steps, moved = fewest_steps(count), 2 * (count - 1) / count
            self._reductions[devices] = [
                (steps * step.latency_s, moved * step.s_per_byte)
                for step in self.links.reduction(devices)
            ]
        place = (stage.begin, slice(stage.begin + 1, stage.end + 1))
        bytes_ = self.intervals.gradient_bytes[place]
        rows = [moving_s(bytes_, start_s, each_s) for start_s, each_s in self._reductions[devices]]
        reduction = np.max(rows, axis=0)
        return float(exposed_s(reduction, self.intervals.earlier_s(self._counts(stage), place))[-1])

    def channel_s(
        self, cut: int, here: tuple[int, ...], there: tuple[int, ...]
    ) -> tuple[float, float]:
        """Return seconds forward and back over the best pair of devices."""
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


def _below(figures: Sequence[_Stage], channels: Sequence[tuple[float, float]]) -> list[float]:
    """Return a microbatch's way from each stage on to the last and back; 0 after the last."""
    below = [0.0] * (len(figures) + 1)
    for place in reversed(range(len(figures))):
        send = sum(channels[place]) if place < len(channels) else 0.0
        path = figures[place].forward_s + figures[place].gradient_s
        below[place] = path + send + below[place + 1]
    return below


def _without_wait_s(span: ReplicaSpan, count: int) -> float:
    """Return what a replica does besides waiting for the first or the last microbatch."""
    forward, backward = span.forward_s, span.backward_s
    return max(forward + count * backward, count * forward + backward)
