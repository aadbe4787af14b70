"""Improve a partition by small changes near the stage that sets its bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from planner.partition.bounds.quick import Numbered, QuickBound, Score
from planner.partition.chain import Partition
from planner.partition.search.moves import Moves
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
        self._moves = Moves(quick, self._random)
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
            return self._moves.shift(stages, place)
        if kind < 0.7 and self._replication:
            return self._moves.hand_over(stages, place)
        return self._moves.exchange(stages, place)
