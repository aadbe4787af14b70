"""Averaging weights over the groups that a scheduler forms."""

from __future__ import annotations

from executor.exchange.neighbours import Neighbours
from executor.optimisation import Outcome
from executor.sync.protocol import Optimise


class GroupAverage:
    """A local optimizer step, then the mean of the weights over a group.

    ``X(k+1) = (X(k) - rate * G(k)) W(k)`` with doubly stochastic ``W(k)`` (SDPipe, VLDB 2023,
    section 3). Momentum and Adam's moments stay each pipeline's own. A group in which somebody
    fails is left out by those it fails for: means of weights tolerate that, sums of gradients
    would not.

    Args:
        neighbours: at this rank's place.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self.reduced = True

    def begin(self, step: int) -> None:
        """Nothing is under way."""

    def update(self, step: int, optimise: Optimise) -> Outcome:
        """Step, ask for a group, average."""
        outcome = optimise()
        weights = self._neighbours.weights
        group = self._neighbours.ask(step)
        self.reduced = self._neighbours.groups.mean(group, weights.flat)
        weights.put_back()
        return outcome

    def settle(self) -> None:
        """Nothing is under way."""

    def reload(self) -> None:
        """Nothing else is kept."""
