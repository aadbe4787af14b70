"""Random small changes of a partition with one stage a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from planner.partition.bounds.quick import Numbered, NumberedStage, QuickBound

MOST_HANDED = 8
"""Devices that are handed over at once."""


class Shares(NamedTuple):
    """Up to which number between 0 and 1 each kind of move is meant; the rest hand devices over.

    Dropping and handing over need replication: without it nothing is drawn there.
    """

    shift: float
    exchange: float
    merge: float
    split: float
    drop: float


class Moves:
    """Changes drawn at random; each is None where it does not apply.

    Args:
        quick: its cuts are the ones stages may end at.
        rng: what is drawn from.
    """

    def __init__(self, quick: QuickBound, rng: random.Random) -> None:
        self._count = quick.links.count
        self._replication = quick.intervals.chain.problem.job.replication
        self._random = rng

    def draw(self, stages: Numbered, place: int, kind: float, shares: Shares) -> Numbered | None:
        """The move that a number between 0 and 1 stands for."""
        if kind < shares.shift:
            return self.shift(stages, place)
        if kind < shares.exchange:
            return self.exchange(stages, place)
        if kind < shares.merge:
            return self.merge(stages, place)
        if kind < shares.split:
            return self.split(stages, place)
        if not self._replication:
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
            return _with(stages, {place: _swapped(stages[place], mine, theirs)})
        theirs = self._random.choice(stages[other].devices)
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
        if self._replication:
            choices.append(tuple(sorted({*first.devices, *second.devices})))
        joined = NumberedStage(first.begin, second.end, self._random.choice(choices))
        return (*stages[:place], joined, *stages[place + 2 :])

    def split(self, stages: Numbered, place: int) -> Numbered | None:
        """Cut a stage in two, on its devices and perhaps unused ones."""
        stage = stages[place]
        pool = list(stage.devices)
        if self._random.random() < 0.5 or len(pool) == 1:
            unused = self._unused(stages)
            pool += self._random.sample(unused, self._random.randint(0, len(unused)))
        if stage.end - stage.begin < 2 or len(pool) < 2:
            return None
        self._random.shuffle(pool)
        count = self._random.randrange(1, len(pool))
        parts = (pool[:count], pool[count:]) if self._replication else (pool[:1], pool[1:2])
        first, second = (tuple(sorted(part)) for part in parts)
        cut = self._random.randrange(stage.begin + 1, stage.end)
        halves = (stage._replace(end=cut, devices=first), NumberedStage(cut, stage.end, second))
        return (*stages[:place], *halves, *stages[place + 1 :])

    def _unused(self, stages: Numbered) -> list[int]:
        used = {device for stage in stages for device in stage.devices}
        return [device for device in range(self._count) if device not in used]


def _with(stages: Numbered, changes: dict[int, NumberedStage]) -> Numbered:
    return tuple(changes.get(place, stage) for place, stage in enumerate(stages))


def _joined(stage: NumberedStage, more: Sequence[int]) -> NumberedStage:
    return stage._replace(devices=tuple(sorted({*stage.devices, *more})))


def _without(stage: NumberedStage, less: Sequence[int]) -> NumberedStage:
    return stage._replace(devices=tuple(d for d in stage.devices if d not in set(less)))


def _swapped(stage: NumberedStage, old: int, new: int) -> NumberedStage:
    return stage._replace(
        devices=tuple(sorted(new if device == old else device for device in stage.devices))
    )
