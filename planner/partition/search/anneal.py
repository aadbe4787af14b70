"""Simulated annealing over partitions by their quick bounds: finds ways that polishing does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from planner.partition.bounds.quick import Numbered, QuickBound, Score
from planner.partition.chain import Partition
from planner.partition.search.moves import Moves
from planner.solver_settings import Clock

CHANGES = 40_000
"""Of one walk."""
HOTTEST = 0.01
COOLEST = 2e-4
"""By how much of its bound a step may be worse, on average, at the start and at the end."""
SECONDS_A_CHANGE = 1e-4
"""What a change counts in deterministic time."""


class Anneal:
    """One walk that cools down with the number of its steps.

    Args:
        quick: scores partitions; its cuts are the ones stages may end at.
        max_stages: the largest number of stages.
        clock: deterministic time is booked on it.
        seed: of the changes.
    """

    def __init__(self, quick: QuickBound, max_stages: int, clock: Clock, seed: int) -> None:
        self._quick = quick
        self._max_stages = max_stages
        self._clock = clock
        self._random = random.Random(seed)
        self._moves = Moves(quick, self._random)
        self._replication = quick.intervals.chain.problem.job.replication

    def improve(self, start: Partition, may_go_on: Callable[[], bool]) -> Iterator[Partition]:
        """Better and better partitions; the first is better than ``start``."""
        current = self._quick.numbered(start)
        if current is None:
            return
        score = self._quick.score(current)
        best_s = score.bound_s
        for step in range(CHANGES):
            if not may_go_on():
                return
            self._clock.spend(SECONDS_A_CHANGE)
            heat = HOTTEST * (COOLEST / HOTTEST) ** (step / CHANGES)
            # Metropolis' rule, turned round: what the next step may come to at most.
            most_s = score.bound_s * (1 - heat * math.log(1 - self._random.random()))
            changed = self._change(current, score)
            if changed is None or len(changed) > self._max_stages:
                continue
            found = self._quick.score(changed)
            if found.bound_s > most_s:
                continue
            current, score = changed, found
            if score.bound_s < best_s * (1 - 1e-9):
                best_s = score.bound_s
                yield self._quick.named(current)

    def _change(self, stages: Numbered, score: Score) -> Numbered | None:
        """One random change, every other one at the stage that sets the bound."""
        place, kind = score.critical, self._random.random()
        if self._random.random() < 0.5 or place >= len(stages):
            place = self._random.randrange(len(stages))
        if kind < 0.35:
            return self._moves.shift(stages, place)
        if kind < 0.7:
            return self._moves.exchange(stages, place)
        if kind < 0.75:
            return self._moves.merge(stages, place, replication=self._replication)
        if kind < 0.8:
            return self._moves.split(stages, place, replication=self._replication)
        if not self._replication:
            return None
        if kind < 0.85:
            return self._moves.drop(stages, place)
        return self._moves.hand_over(stages, place)
