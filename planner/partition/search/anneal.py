"""Simulated annealing over partitions by their quick bounds: finds ways that polishing does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from planner.partition.bounds.quick import Numbered, QuickBound, Score
from planner.partition.chain import Partition
from planner.partition.search.cooling import Cooling
from planner.partition.search.moves import Moves, Shares
from planner.solver_settings import Clock

CHANGES = 40_000
"""Of one walk."""
COOLING = Cooling(hottest=0.01, coolest=2e-4)
SHARES = Shares(shift=0.35, exchange=0.7, merge=0.75, split=0.8, drop=0.85)
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
            most_s = COOLING.most(score.bound_s, step / CHANGES, self._random)
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
        return self._moves.draw(stages, place, kind, SHARES)
