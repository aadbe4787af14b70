"""A quick estimate for partitions with several stages a device: no schedule is much faster.

As for the columns of :mod:`planner.search.partition.relaxations`, but for given stages, with the
ways there and home over their own links. Replicas share the microbatches of a stage in proportion
to their speed, in fractions; neighbouring stages with as many devices hand over from the first to
the first, and so on. It is a good guess, and without replicas and messages a bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.search.partition.bounds.quick import (
    NEAR,
    Numbered,
    NumberedStage,
    QuickBound,
    Score,
)
from planner.search.partition.chain import FloatArray, Partition


class _Held(NamedTuple):
    """A stage on one of its devices: seconds of all the microbatches that the device takes."""

    forward_s: float
    gradient_s: float
    backward_s: float
    head_s: float
    home_s: float
    end_s: float
    number: int


class SharedBound:
    """Scores partitions of one problem.

    Args:
        quick: has the figures of stages and links.

    Attributes:
        intervals, links: of the problem.
        stages_per_device: that the job allows.
    """

    def __init__(self, quick: QuickBound) -> None:
        self._quick = quick
        self.intervals, self.links = quick.intervals, quick.links
        job = self.intervals.chain.problem.job
        self.stages_per_device = job.max_stages_per_device
        self._microbatches = job.microbatches
        self._cluster = self.intervals.chain.problem.cluster
        table = self.intervals
        self._forward = [_prefix(row) for row in table.forward_s]
        self._gradient = [_prefix(row) for row in table.gradient_s]
        self._backward = [_prefix(row) for row in table.backward_s]
        self._static = _prefix(table.static_bytes)
        self._stash = _prefix(table.least_stash_bytes)
        self._step = _prefix(table.optimizer_traffic_bytes)
        self._routes: dict[tuple[int, int], tuple[Hashable, ...]] = {}

    def numbered(self, partition: Partition) -> Numbered | None:
        """Return the stages by numbers; None if some cut is not among the intervals'."""
        return self._quick.numbered(partition)

    def named(self, stages: Numbered) -> Partition:
        """Return the stages by positions in the chain and names of devices."""
        return self._quick.named(stages)

    def score(self, partition: Sequence[NumberedStage]) -> Score:
        """Return the estimate, and how near the devices come to it."""
        held: dict[int, list[_Held]] = defaultdict(list)
        for device, row in self._rows(partition):
            held[device].append(row)
        times = [
            (self._device_s(device, rows, partition), rows[-1].number)
            for device, rows in held.items()
        ]
        times += self._links_s(partition)
        bound_s, critical = max(times)
        excess_s = sum(max(0.0, time_s - NEAR * bound_s) for time_s, _ in times)
        return Score(bound_s, excess_s, critical)

    def _rows(self, partition: Sequence[NumberedStage]) -> Iterator[tuple[int, _Held]]:
        """Yield the devices of every stage with what they do of it, from the first stage on."""
        kinds, head_s, way_s = self._quick.kinds, 0.0, 0.0
        for number, stage in enumerate(partition):
            forward, gradient, backward = (
                [_between(table[kinds[d]], stage) for d in stage.devices]
                for table in (self._forward, self._gradient, self._backward)
            )
            there_s, back_s = self._hop(partition, number)
            head_s += there_s
            speeds = [1 / max(f + b, 1e-12) for f, b in zip(forward, backward, strict=True)]
            end_s = self._quick.reduction_s(stage)
            for position, device in enumerate(stage.devices):
                taken = self._microbatches * speeds[position] / sum(speeds)
                yield (
                    device,
                    _Held(
                        taken * forward[position],
                        taken * gradient[position],
                        taken * backward[position],
                        head_s,
                        way_s + back_s,
                        end_s,
                        number,
                    ),
                )
            head_s += min(forward)
            way_s += min(gradient) + back_s

    def _hop(self, partition: Sequence[NumberedStage], number: int) -> tuple[float, float]:
        """Return a microbatch's way into a stage, and its gradient's way out of it."""
        if number == 0:
            return 0.0, 0.0
        before, stage = partition[number - 1], partition[number]
        if set(before.devices) & set(stage.devices):
            return 0.0, 0.0
        return self._quick.channel_s(stage.begin, before.devices, stage.devices)

    def _device_s(
        self, device: int, rows: Sequence[_Held], partition: Sequence[NumberedStage]
    ) -> float:
        """Return the least time of a device; infinite if its stages do not fit its memory."""
        kind = self.intervals.types[self._quick.kinds[device]]
        stages = [partition[row.number] for row in rows]
        needed = sum(_between(self._static, s) + _between(self._stash, s) for s in stages)
        if needed > kind.capacity_bytes:
            return float("inf")
        traffic = sum(_between(self._step, stage) for stage in stages)
        step_s = traffic / (kind.optimizer_gb_per_s * 1e9)
        before_s = home_s = forward_s = gradient_s = 0.0
        for row in reversed(rows):
            forward_s, gradient_s = forward_s + row.forward_s, gradient_s + row.gradient_s
            before_s = max(before_s, row.head_s + forward_s)
            home_s = max(home_s, row.home_s + gradient_s)
        work_s = sum(row.backward_s for row in rows) + min(row.end_s for row in rows)
        return before_s + max(work_s + step_s, home_s)

    def _links_s(self, partition: Sequence[NumberedStage]) -> list[tuple[float, int]]:
        """Return how long each link is busy with messages, and the stage before the last of them.

        They count as if they waited for each other, which is a guess where links are shared.
        Between stages with unlike numbers of devices it is not known which links are used.
        """
        if not self.links.is_exclusive:
            return []
        busy: dict[Hashable, tuple[float, int]] = {}
        for number, (first, second) in enumerate(pairwise(partition)):
            if len(first.devices) == len(second.devices):
                share = self._microbatches / len(first.devices)
                for u, v in zip(first.devices, second.devices, strict=True):
                    for link, seconds in self._messages(second.begin, u, v):
                        busy[link] = busy.get(link, (0.0, 0))[0] + share * seconds, number
        return list(busy.values())

    def _messages(self, cut: int, u: int, v: int) -> Iterator[tuple[Hashable, float]]:
        """Yield the links that a microbatch takes there and back, and for how long."""
        if u != v:
            there_s, back_s = self._quick.channel_s(cut, (u,), (v,))
            yield from ((link, there_s) for link in self._route(u, v))
            yield from ((link, back_s) for link in self._route(v, u))

    def _route(self, source: int, target: int) -> tuple[Hashable, ...]:
        if (source, target) not in self._routes:
            names = self._cluster.device_names
            route = self._cluster.route(names[source], names[target])
            self._routes[source, target] = () if route is None else tuple(route.links)
        return self._routes[source, target]


def _prefix(sums: FloatArray) -> list[float]:
    """Return the sums of all layers before each cut."""
    return [0.0, *(float(x) for x in sums[0, 1:])]


def _between(prefix: Sequence[float], stage: NumberedStage) -> float:
    return prefix[stage.end] - prefix[stage.begin]
