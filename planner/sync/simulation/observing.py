"""Observations of simulated weights: their loss, their distance, and how well groups mix them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.sync.simulation.training import LearningProblem

OBSERVATIONS = 100
"""Number of observations in the time that the iterations take without waiting."""
MOST_OBSERVATIONS = 4 * OBSERVATIONS


@dataclass(frozen=True)
class Observation:
    """The state at a virtual time.

    Attributes:
        at_s: the time.
        iterations: done by all workers together.
        loss: loss of the mean of the workers' weights, over samples that no worker trains on.
        distance: root mean square distance of the workers' weights from their mean, as a fraction
            of the mean's norm.
    """

    at_s: float
    iterations: int
    loss: float
    distance: float


@dataclass
class Observer:
    """Observes the weights at regular virtual times.

    Attributes:
        problem: the problem whose loss is evaluated.
        interval_s: time between observations, doubled after each :data:`MOST_OBSERVATIONS`.
    """

    problem: LearningProblem
    interval_s: float
    observations: list[Observation] = field(default_factory=list)
    next_s: float = 0.0

    def until(self, now_s: float, weights: FloatArray, iterations: int) -> None:
        """Observe weights that did not change since the last event until now."""
        while self.next_s <= now_s:
            self.observe(self.next_s, weights, iterations)
            self.next_s += self.interval_s
            if len(self.observations) % MOST_OBSERVATIONS == 0:
                self.interval_s *= 2

    def observe(self, at_s: float, weights: FloatArray, iterations: int) -> None:
        """Evaluate the workers' weights, one row each; a single row is a model that all share."""
        mean = weights.mean(axis=0)
        squares = ((weights - mean) ** 2).sum(axis=1).mean()
        distance = float(np.sqrt(squares) / (np.linalg.norm(mean) or 1.0))
        self.observations.append(
            Observation(at_s, iterations, self.problem.held_out_loss(mean), distance)
        )


def mixing_matrix(groups: Sequence[tuple[int, ...]], workers: int) -> FloatArray:
    """Return the mean effect of a round of groups on the workers' weights.

    A group replaces its members' weights by their mean: a projection, equal to its own square, so
    that E[W] is E[W^T W]. A round consists of consecutive groups that have as many members together
    as there are workers; the product is taken to first order, exact if the groups of a round are
    disjoint.

    Returns:
        A matrix whose rows and columns sum to 1; diagonal entries may be negative if some workers
        meet far more often than others.
    """
    met = np.zeros((workers, workers))
    for group in groups:
        rows = np.array(group)
        met[rows[:, None], rows] += 1 / len(group)
    away = np.diag(met.sum(axis=1)) - met
    matrix: FloatArray = np.eye(workers) - away * (workers / max(sum(map(len, groups)), 1))
    return matrix


def spectral_gap(groups: Sequence[tuple[int, ...]], workers: int) -> float:
    """Return 1 less the second largest eigenvalue of :func:`mixing_matrix`.

    It is 1 if every round averages all workers, 0 if some workers are never connected; the squared
    disagreement falls by about this fraction per round.
    """
    if workers == 1:
        return 1.0
    eigenvalues = np.linalg.eigvalsh(mixing_matrix(groups, workers))
    return float(min(max(1 - eigenvalues[-2], 0.0), 1.0))
