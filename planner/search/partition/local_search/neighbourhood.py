"""Small changes of a partition, drawn at random (one stage a device) or all of them.

Shift a boundary, swap or move devices, drop a replica, merge or split stages.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.search.partition.bounds.quick import Numbered, NumberedStage, PartitionScorer
from planner.search.partition.chain import Chain, Partition, StageChoice

MOST_HANDED = 8
"""Devices that are handed over at once."""


class MoveShares(NamedTuple):
    """Up to which number between 0 and 1 each kind of move is meant; the rest hand devices over.

    Dropping and handing over need replication: without it nothing is drawn there.
    """

    shift: float
    exchange: float
    merge: float
    split: float
    drop: float


class PartitionMoves:
    """Changes drawn at random; each is None where it does not apply.

    Args:
        quick: its cuts are the ones stages may end at.
        rng: what is drawn from.
        count: of the devices, or units of several, that stages have; by default all devices.

    Attributes:
        replication: whether stages may have several devices.
    """

    def __init__(
        self, quick: PartitionScorer, rng: random.Random, count: int | None = None
    ) -> None:
        self._count = quick.links.count if count is None else count
        self._stages_per_device = quick.stages_per_device
        self.replication = quick.intervals.chain.problem.job.replication
        self._random = rng

    def draw(
        self, stages: Numbered, place: int, kind: float, shares: MoveShares
    ) -> Numbered | None:
        """Return what the move leads to that a number between 0 and 1 stands for."""
        if kind < shares.shift:
            return self.shift(stages, place)
        if kind < shares.exchange:
            return self.exchange(stages, place)
        if kind < shares.merge:
            return self.merge(stages, place)
        if kind < shares.split:
            return self.split(stages, place)
        if not self.replication:
            return None
        if kind < shares.drop:
            return self.drop(stages, place)
        return self.hand_over(stages, place)

    def shift(self, stages: Numbered, place: int) -> Numbered | None:
        """Move one of a stage's ends by a few cells."""
        left = place - 1 if self._random.random() < 0.5 else place
        if not 0 <= left < len(stages) - 1:
            return None
        first, second = stages[left], stages[left + 1]
        cut = first.end + self._random.choice((-3, -2, -1, 1, 2, 3))
        if not first.begin < cut < second.end:
            return None
        return _with(stages, {left: first._replace(end=cut), left + 1: second._replace(begin=cut)})

    def hand_over(self, stages: Numbered, place: int) -> Numbered | None:
        """Give a stage devices of another one, or an unused one; or give some of its own away."""
        other = self._random.randrange(len(stages) + 1)
        if other == len(stages):
            unused = self._unused(stages)
            if not unused:
                return None
            return _with(stages, {place: _joined(stages[place], [self._random.choice(unused)])})
        giver, taker = (other, place) if self._random.random() < 0.7 else (place, other)
        most = min(len(stages[giver].devices) - 1, MOST_HANDED)
        if giver == taker or most < 1:
            return None
        count = self._random.randint(1, most)
        start = self._random.randrange(len(stages[giver].devices) - count + 1)
        moved = stages[giver].devices[start : start + count]
        return _with(
            stages,
            {giver: _without(stages[giver], moved), taker: _joined(stages[taker], moved)},
        )

    def exchange(self, stages: Numbered, place: int) -> Numbered | None:
        """Swap a device of a stage with one of another stage, or with an unused one."""
        mine = self._random.choice(stages[place].devices)
        other = self._random.randrange(len(stages) + 1)
        if other == place:
            return None
        if other == len(stages):
            unused = self._unused(stages)
            if not unused:
                return None
            theirs = self._random.choice(unused)
            if theirs in stages[place].devices:
                return None
            return _with(stages, {place: _swapped(stages[place], mine, theirs)})
        theirs = self._random.choice(stages[other].devices)
        if theirs in stages[place].devices or mine in stages[other].devices:
            return None
        return _with(
            stages,
            {
                place: _swapped(stages[place], mine, theirs),
                other: _swapped(stages[other], theirs, mine),
            },
        )

    def drop(self, stages: Numbered, place: int) -> Numbered | None:
        """Leave one of a stage's devices unused."""
        devices = stages[place].devices
        if len(devices) == 1:
            return None
        return _with(stages, {place: _without(stages[place], [self._random.choice(devices)])})

    def merge(self, stages: Numbered, place: int) -> Numbered | None:
        """Join a stage and the next on the devices of either, or of both."""
        if place + 1 == len(stages):
            return None
        first, second = stages[place : place + 2]
        choices = [first.devices, second.devices]
        if self.replication:
            choices.append(tuple(sorted({*first.devices, *second.devices})))
        joined = NumberedStage(first.begin, second.end, self._random.choice(choices))
        return (*stages[:place], joined, *stages[place + 2 :])

    def split(self, stages: Numbered, place: int) -> Numbered | None:
        """Cut a stage in two, on its devices and perhaps unused ones."""
        stage = stages[place]
        pool = list(stage.devices)
        if self._random.random() < 0.5 or len(pool) == 1:
            unused = [device for device in self._unused(stages) if device not in pool]
            pool += self._random.sample(unused, self._random.randint(0, len(unused)))
        if stage.end - stage.begin < 2 or len(pool) < 2:
            return None
        self._random.shuffle(pool)
        count = self._random.randrange(1, len(pool))
        parts = (pool[:count], pool[count:]) if self.replication else (pool[:1], pool[1:2])
        first, second = (tuple(sorted(part)) for part in parts)
        cut = self._random.randrange(stage.begin + 1, stage.end)
        both = (stage._replace(end=cut, devices=first), NumberedStage(cut, stage.end, second))
        return (*stages[:place], *both, *stages[place + 1 :])

    def _unused(self, stages: Numbered) -> list[int]:
        return _unused(stages, self._count, self._stages_per_device)


class NeighbourPartitions:
    """All partitions one step away, in a fixed order; ``begin`` and ``end`` count the job's cuts.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        shares: let devices hold as many stages as the job allows, else one each.
    """

    def __init__(self, chain: Chain, max_stages: int, *, shares: bool = False) -> None:
        cluster = chain.problem.cluster
        self._names = cluster.device_names
        self._numbers = cluster.numbers
        job = chain.problem.job
        self._replication = job.replication
        self._stages_per_device = job.max_stages_per_device if shares else 1
        self._max_stages = max_stages
        self._cuts = chain.cuts
        self._number_of = {cut: number for number, cut in enumerate(chain.cuts)}

    def of(self, partition: Partition) -> Iterator[Partition]:
        """Yield the neighbours of a partition, with nothing recomputed.

        A device holds no more stages than allowed if none does so in the partition, whose cuts are
        the job's.
        """
        number_of, cuts = self._number_of, self._cuts
        stages = tuple(
            NumberedStage(
                number_of[s.begin],
                number_of[s.end],
                tuple(self._numbers[name] for name in s.devices),
            )
            for s in partition
        )
        for found in self._changed(stages):
            yield tuple(
                StageChoice(
                    cuts[s.begin], cuts[s.end], tuple(self._names[number] for number in s.devices)
                )
                for s in found
            )

    def _changed(self, stages: Numbered) -> Iterator[Numbered]:
        unused = _unused(stages, len(self._names), self._stages_per_device)
        yield from _shifted_boundaries(stages)
        yield from _swapped_devices(stages, unused)
        yield from _merged_stages(stages)
        if self._replication:
            yield from _moved_devices(stages, unused)
        if len(stages) < self._max_stages:
            yield from _split_stages(stages, unused)


def _shifted_boundaries(stages: Numbered) -> Iterator[Numbered]:
    for j, (first, second) in enumerate(pairwise(stages)):
        for step in (-4, -2, -1, 1, 2, 4):
            cut = first.end + step
            if first.begin < cut < second.end:
                yield _with(stages, {j: first._replace(end=cut), j + 1: second._replace(begin=cut)})


def _swapped_devices(stages: Numbered, unused: list[int]) -> Iterator[Numbered]:
    """Exchange two devices of different stages, or one with an unused one."""
    for j, stage in enumerate(stages):
        for device in stage.devices:
            for other in unused:
                if other not in stage.devices:
                    yield _with(stages, {j: _swapped(stage, device, other)})
            for k in range(j + 1, len(stages)):
                for other in stages[k].devices:
                    if other in stage.devices or device in stages[k].devices:
                        continue
                    theirs = _swapped(stages[k], other, device)
                    yield _with(stages, {j: _swapped(stage, device, other), k: theirs})


def _moved_devices(stages: Numbered, unused: list[int]) -> Iterator[Numbered]:
    """Add an unused device to a stage, drop a replica, or give one to another stage."""
    for j, stage in enumerate(stages):
        for device in unused:
            yield _with(stages, {j: _joined(stage, [device])})
        for device in stage.devices if len(stage.devices) > 1 else ():
            less = _without(stage, [device])
            yield _with(stages, {j: less})
            for k, target in enumerate(stages):
                if k != j:
                    yield _with(stages, {j: less, k: _joined(target, [device])})


def _merged_stages(stages: Numbered) -> Iterator[Numbered]:
    """Join two neighbouring stages on the devices of either."""
    for j, (first, second) in enumerate(pairwise(stages)):
        for devices in (first.devices, second.devices):
            merged = NumberedStage(first.begin, second.end, devices)
            yield (*stages[:j], merged, *stages[j + 2 :])


def _split_stages(stages: Numbered, unused: list[int]) -> Iterator[Numbered]:
    """Cut a stage at three places; the new stage gets an unused device or half the replicas."""
    for j, stage in enumerate(stages):
        quarters = {stage.begin + (stage.end - stage.begin) * part // 4 for part in (1, 2, 3)}
        for cut in sorted(quarters - {stage.begin}):
            for kept, given in _device_splits(stage, unused):
                first = NumberedStage(stage.begin, cut, kept)
                second = NumberedStage(cut, stage.end, given)
                yield (*stages[:j], first, second, *stages[j + 1 :])


def _device_splits(
    stage: NumberedStage, unused: list[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for device in unused:
        yield stage.devices, (device,)
        yield (device,), stage.devices
    half = len(stage.devices) // 2
    if half:
        yield stage.devices[:half], stage.devices[half:]


def _unused(stages: Numbered, count: int, stages_per_device: int = 1) -> list[int]:
    """Return the devices that may hold another stage."""
    held = Counter(device for stage in stages for device in stage.devices)
    return [device for device in range(count) if held[device] < stages_per_device]


def _with(stages: Numbered, changes: dict[int, NumberedStage]) -> Numbered:
    return tuple(changes.get(place, stage) for place, stage in enumerate(stages))


def _joined(stage: NumberedStage, more: Sequence[int]) -> NumberedStage:
    return stage._replace(devices=tuple(sorted({*stage.devices, *more})))


def _without(stage: NumberedStage, less: Sequence[int]) -> NumberedStage:
    return stage._replace(devices=tuple(sorted(set(stage.devices) - set(less))))


def _swapped(stage: NumberedStage, old: int, new: int) -> NumberedStage:
    return stage._replace(
        devices=tuple(sorted(new if device == old else device for device in stage.devices))
    )
