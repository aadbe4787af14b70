"""Relaxation rounding: partitions of large clusters that follow the surrogate relaxation.

The relaxation says which layers a stage holds and what its quickest replica is; here each stage is
given real devices, node by node, until its replicas carry all microbatches within the limit. What
comes out is a partition of the problem itself, to be scored by
planner.search.partition.bounds.schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from planner.costs.collectives import fewest_steps
from planner.search.partition.chain import Partition, StageChoice
from planner.search.partition.intervals import exposed_s
from planner.search.partition.relaxations.surrogate_relaxation import (
    RelaxedStage,
    SurrogateRelaxation,
)

STRETCH = (1.0, 1.005, 1.01, 1.015, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
"""Limits tried, as multiples of the bound."""


def rounded_partitions(relaxation: SurrogateRelaxation, bound_s: float) -> Iterator[Partition]:
    """Yield partitions for ever looser limits.

    Args:
        relaxation: after its bound was found, so that its prices use up every type.
        bound_s: that bound.
    """
    for stretch in STRETCH:
        stages = relaxation.stages(bound_s * stretch)
        if stages is None:
            continue
        partition = _Rounding(relaxation, bound_s * stretch).partition(stages)
        if partition is not None:
            yield partition


class _Rounding:
    """Gives devices to stages one after the other.

    Args:
        relaxation: where the stages are from.
        limit_s: for every stage to keep.
    """

    def __init__(self, relaxation: SurrogateRelaxation, limit_s: float) -> None:
        self._relaxation = relaxation
        self._table = relaxation.intervals
        self._limit_s = limit_s
        self._left = [
            deque(np.flatnonzero(relaxation.kinds == k).tolist())
            for k in range(len(relaxation.counts))
        ]
        self._before: list[int] = []
        self._spent_s = self._head_s = 0.0

    def partition(self, stages: Sequence[RelaxedStage]) -> Partition | None:
        """Return the stages on devices; None if these do not suffice."""
        chosen: list[StageChoice] = []
        names = self._relaxation.chain.problem.cluster.device_names
        for place, stage in enumerate(stages):
            kept = [0] * len(self._left)
            for later in stages[place + 1 :]:
                kept[later.quickest] += 1
            devices = self._replicas(stage, kept)
            if devices is None:
                return None
            held = tuple(names[device] for device in sorted(devices))
            cuts = self._table.cuts
            chosen.append(StageChoice(int(cuts[stage.begin]), int(cuts[stage.end]), held))
            self._go_on(stage, devices)
        return tuple(chosen)

    def _replicas(self, stage: RelaxedStage, kept: list[int]) -> list[int] | None:
        """Return enough devices for all microbatches, leaving one a later stage where needed."""
        if not self._left[stage.quickest]:
            return None
        devices = [self._left[stage.quickest].popleft()]
        self._arrive(stage, devices[0])
        while not self._carry(stage, devices):
            free = [k for k, left in enumerate(self._left) if len(left) > kept[k]]
            if not free or not self._relaxation.chain.problem.job.replication:
                return None
            k = max(free, key=lambda k: self._value(stage, devices, k))
            devices.append(self._left[k].popleft())
        return devices

    def _arrive(self, stage: RelaxedStage, device: int) -> None:
        """Account for the transfer from the stage before."""
        if not self._before:
            return
        links, table = self._relaxation.links, self._table
        column = np.ix_(self._before, [device])
        latency_s, s_per_byte = links.latency_s[column], links.s_per_byte[column]
        there, back = (
            float((latency_s + bytes_ * s_per_byte).min()) if bytes_ else 0.0
            for bytes_ in (row[stage.begin] for row in table.crossing_bytes)
        )
        self._spent_s += there + back
        self._head_s += there

    def _room_s(self, stage: RelaxedStage, devices: list[int]) -> float:
        """Return the time for the load of a stage."""
        return self._limit_s - max(self._spent_s, self._head_s + self._end_s(stage, devices))

    def _microbatches(self, stage: RelaxedStage, room_s: float, k: int) -> float:
        """Return the microbatches that one device of a type can do in the time."""
        place = (stage.begin, stage.end)
        work = float(self._table.forward_s[k][place] + self._table.backward_s[k][place])
        count = float(self._table.microbatches)
        return count if work <= 0 else min(count, max(0.0, room_s // work))

    def _value(self, stage: RelaxedStage, devices: list[int], k: int) -> float:
        """Return the microbatches for the price of a device."""
        room_s = self._room_s(stage, devices)
        return self._microbatches(stage, room_s, k) / float(self._relaxation.prices[k])

    def _carry(self, stage: RelaxedStage, devices: list[int]) -> bool:
        """Return whether these replicas run all microbatches in the time they have."""
        room_s = self._room_s(stage, devices)
        kinds = [int(self._relaxation.kinds[device]) for device in devices]
        total = sum(
            kinds.count(k) * self._microbatches(stage, room_s, k) for k in sorted(set(kinds))
        )
        return total >= self._table.microbatches

    def _end_s(self, stage: RelaxedStage, devices: list[int]) -> float:
        """Return seconds of reduction, over the widest links there can be, and optimizer step."""
        count, place = len(devices), (stage.begin, stage.end)
        counts = [0] * len(self._left)
        for device in devices:
            counts[int(self._relaxation.kinds[device])] += 1
        step = float(self._table.optimizer_s(tuple(counts))[place])
        bytes_ = float(self._table.gradient_bytes[place])
        if count < 2 or bytes_ == 0:
            return step
        links = self._relaxation.links
        moved = 2 * (count - 1) / count * bytes_ * float(links.joint_s_per_byte[count])
        reduction = fewest_steps(count) * links.least_latency_s + moved
        earlier_s = self._table.earlier_s(tuple(counts), place)
        return step + float(exposed_s(np.array([reduction]), earlier_s)[0])

    def _go_on(self, stage: RelaxedStage, devices: list[int]) -> None:
        """Account for the stage and for the transfer to the next."""
        place = (stage.begin, stage.end)
        forward = min(float(self._table.forward_s[k][place]) for k in self._kinds(devices))
        backward = min(float(self._table.backward_s[k][place]) for k in self._kinds(devices))
        self._spent_s = max(self._spent_s, self._head_s + self._end_s(stage, devices))
        self._spent_s += forward + backward
        self._head_s += forward
        self._before = devices

    def _kinds(self, devices: list[int]) -> set[int]:
        return {int(self._relaxation.kinds[device]) for device in devices}
