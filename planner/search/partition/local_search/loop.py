"""One loop for every local search: draw a change, judge what it leads to, go on from there or not.

The moves and the acceptance are passed in. A rule of acceptance is made for one search; it sees
every change, also those that do not apply.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

State = TypeVar("State")
Score = TypeVar("Score")
ScoreToJudge = TypeVar("ScoreToJudge", contravariant=True)


class Acceptance(Protocol[ScoreToJudge]):
    """When to go on from a change, and when to end."""

    def goes_on(self, score: ScoreToJudge) -> bool:
        """Return whether to draw another change of a state with this score."""

    def accepts(self, found: ScoreToJudge, score: ScoreToJudge) -> bool:
        """Return whether to go on from what a change led to."""


def local_search(
    state: State,
    score: Score,
    draw: Callable[[State, Score], State | None],
    judge: Callable[[State], Score | None],
    acceptance: Acceptance[Score],
) -> Iterator[tuple[State, Score]]:
    """Yield every state that is accepted, with its score.

    Args:
        state: where to start.
        score: of the start.
        draw: a change of a state; None where the change drawn does not apply.
        judge: the score of a state; None where it is not worth one.
        acceptance: which changes to go on from.
    """
    while acceptance.goes_on(score):
        changed = draw(state, score)
        found = None if changed is None else judge(changed)
        if changed is None or found is None or not acceptance.accepts(found, score):
            continue
        state, score = changed, found
        yield state, score


class GreedyAcceptance(Acceptance[Score]):
    """Accept what is better by a key; end after so many changes in a row that were not.

    Args:
        key: of a score; less is better.
        patience: changes without improvement after which the search ends.
        may_go_on: whether there is time for another change.
    """

    def __init__(
        self,
        key: Callable[[Score], tuple[float, ...]],
        patience: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        self._key = key
        self._patience = patience
        self._may_go_on = may_go_on
        self._failures = 0

    def goes_on(self, score: Score) -> bool:
        """Return whether there is patience and time for another change."""
        if self._failures >= self._patience or not self._may_go_on():
            return False
        self._failures += 1
        return True

    def accepts(self, found: Score, score: Score) -> bool:
        """Return whether the change is an improvement."""
        is_better = self._key(found) < self._key(score)
        if is_better:
            self._failures = 0
        return is_better


@dataclass(frozen=True)
class Cooling:
    """Geometric cooling.

    Attributes:
        hottest, coolest: by what share of its value a step may be worse, on average, at the start
            and at the end.
    """

    hottest: float
    coolest: float

    def most(self, value: float, spent: float, rng: random.Random) -> float:
        """Return what the next step may come to at most: Metropolis' rule, turned round.

        Args:
            value: of the state to change.
            spent: share of the walk that is over, from 0 to 1.
            rng: one number is drawn from it.
        """
        heat: float = self.hottest * (self.coolest / self.hottest) ** spent
        return value * (1 - heat * math.log(1 - rng.random()))


class AnnealingAcceptance(Acceptance[Score]):
    """Accept what is worse by no more than the heat allows; end when the walk has cooled.

    Args:
        cooling: of the walk.
        value_s: seconds of a score.
        spent: share of the walk that is over, asked once a change.
        may_go_on: whether there is time for another change.
        rng: one number is drawn from it for every change, before the change itself.

    Attributes:
        most_s: what the change that is being judged may come to at most, in seconds.
    """

    def __init__(
        self,
        cooling: Cooling,
        value_s: Callable[[Score], float],
        spent: Callable[[], float],
        may_go_on: Callable[[], bool],
        rng: random.Random,
    ) -> None:
        self.most_s = math.inf
        self._cooling = cooling
        self._value_s = value_s
        self._spent = spent
        self._may_go_on = may_go_on
        self._random = rng

    def goes_on(self, score: Score) -> bool:
        """Return whether the walk is not over, and find out what the next change may come to."""
        spent = self._spent()
        if spent >= 1 or not self._may_go_on():
            return False
        self.most_s = self._cooling.most(self._value_s(score), spent, self._random)
        return True

    def accepts(self, found: Score, score: Score) -> bool:
        """Return whether the change is within what the heat allows."""
        return self._value_s(found) <= self.most_s
