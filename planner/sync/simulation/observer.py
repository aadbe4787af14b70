"""What is looked at in regular intervals of virtual time: the mean model and its spread."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.sync.simulation.problem import Problem

LOOKS = 100
"""In the time that the iterations take if nobody ever waits; later ones are further apart."""
MOST_LOOKS = 4 * LOOKS


@dataclass(frozen=True)
class Look:
    """The state at a virtual time.

    Attributes:
        at_s: the time.
        iterations: done by all workers together.
        loss: of the mean of the workers' weights, over the whole data set.
        distance: root mean square distance of the workers' weights from their mean, as a share of
            the mean's norm.
    """

    at_s: float
    iterations: int
    loss: float
    distance: float


@dataclass
class Observer:
    """Looks at the weights whenever virtual time passes one of its marks.

    Attributes:
        problem: whose loss is evaluated.
        interval_s: between looks, doubled each time there are :data:`MOST_LOOKS` more.
    """

    problem: Problem
    interval_s: float
    looks: list[Look] = field(default_factory=list)
    next_s: float = 0.0

    def until(self, now_s: float, weights: FloatArray, iterations: int) -> None:
        """The weights have been these since the last event, until now."""
        while self.next_s <= now_s:
            self.look(self.next_s, weights, iterations)
            self.next_s += self.interval_s
            if len(self.looks) % MOST_LOOKS == 0:
                self.interval_s *= 2

    def look(self, at_s: float, weights: FloatArray, iterations: int) -> None:
        """Evaluate the workers' weights, one row each; one row alone is a model that all share."""
        mean = weights.mean(axis=0)
        squares = ((weights - mean) ** 2).sum(axis=1).mean()
        distance = float(np.sqrt(squares) / (np.linalg.norm(mean) or 1.0))
        self.looks.append(Look(at_s, iterations, self.problem.loss(mean), distance))
