"""Improve a partition by small changes near the stage that sets its bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from planner.partition.bounds.quick import Numbered, NumberedStage, QuickBound, Score
from planner.partition.chain import Partition
from planner.solver_settings import Clock

PATIENCE = 4000
"""Changes in a row without any improvement after which it ends."""
SECONDS_A_CHANGE = 1e-4
"""What a change counts in deterministic time."""


class Polish:
    """Random small changes; those that lower the bound, or else the excess, are kept.

    Args:
        quick: scores partitions; its cuts are the ones stages may end at.
        clock: deterministic time is booked on it.
        seed: of the changes.
    """

    def __init__(self, quick: QuickBound, clock: Clock, seed: int) -> None:
        self._quick = quick
        self._clock = clock
        self._random = random.Random(seed)
        job = quick.intervals.chain.problem.job
        self._replication = job.replication

    def improve(self, start: Partition, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Better and better partitions; the first is better than ``start``."""
        current = self._quick.numbered(start)
        if current is None:
            return
        score, failures = self._quick.score(current), 0
        while failures < PATIENCE and may_go_on():
            self._clock.spend(SECONDS_A_CHANGE)
            changed = self._change(current, score)
            failures += 1
            if changed is None:
                continue
            found = self._quick.score(changed)
            if found[:2] < score[:2]:
                better = found.bound_s < score.bound_s * (1 - 1e-9)
                current, score, failures = changed, found, 0
                if better:
                    yield self._quick.named(current)

    def _change(self, stages: Numbered, score: Score) -> Numbered | None:
        """One random change, mostly at the stage that sets the bound."""
        place = score.critical
        if self._random.random() < 0.3:
            place = self._random.randrange(len(stages))
        kind = self._random.random()
        if kind < 0.4:
            return self._shift(stages, place)
        if kind < 0.7 and self._replication:
            return self._hand_over(stages, place)
        return self._exchange(stages, place)

    def _shift(self, stages: Numbered, place: int) -> Numbered | None:
        """Move one of a stage's ends by a few cells."""
        left = place - 1 if self._random.random() < 0.5 else place
        if not 0 <= left < len(stages) - 1:
            return None
        first, second = stages[left], stages[left + 1]
        cut = first.end + self._random.choice((-3, -2, -1, 1, 2, 3))
        if not first.begin < cut < second.end:
            return None
        return _with(stages, {left: first._replace(end=cut), left + 1: second._replace(begin=cut)})

    def _hand_over(self, stages: Numbered, place: int) -> Numbered | None:
        """Give a stage devices of another one, or unused ones; or give some of its own away."""
        other = self._random.randrange(len(stages) + 1)
        if other == len(stages):
            unused = self._unused(stages)
            if not unused:
                return None
            return _with(stages, {place: _joined(stages[place], [self._random.choice(unused)])})
        giver, taker = (other, place) if self._random.random() < 0.7 else (place, other)
        most = min(len(stages[giver].devices) - 1, 8)
        if giver == taker or most < 1:
            return None
        count = self._random.randint(1, most)
        start = self._random.randrange(len(stages[giver].devices) - count + 1)
        moved = stages[giver].devices[start : start + count]
        return _with(
            stages,
            {giver: _without(stages[giver], moved), taker: _joined(stages[taker], moved)},
        )

    def _exchange(self, stages: Numbered, place: int) -> Numbered | None:
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

    def _unused(self, stages: Numbered) -> list[int]:
        used = {device for stage in stages for device in stage.devices}
        return [device for device in range(self._quick.links.count) if device not in used]


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
