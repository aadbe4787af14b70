"""The state of a simulated run: its workers, weights, observations and recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.cluster.link_table import FloatArray
from planner.measured.sync_trace import SyncStep
from planner.sync.simulation.slowness import SimulatedFault, Slowdowns
from planner.sync.simulation.training import LearningProblem, Training
from planner.sync.simulation.world import World

OBSERVATIONS = 100
"""Number of observations in the time that the iterations take without waiting."""
MOST_OBSERVATIONS = 4 * OBSERVATIONS


class TraceRecorder:
    """Records the iterations of every worker."""

    def __init__(self, workers: int) -> None:
        self.rows: list[list[SyncStep]] = [[] for _ in range(workers)]
        self._open: dict[tuple[int, int], tuple[int, float, float]] = {}

    def begin(self, worker: int, key: int, iteration: int, start_s: float, ended_s: float) -> None:
        """Record that a pipeline rank computes from ``start_s`` until ``ended_s``."""
        self._open[worker, key] = (iteration, start_s, ended_s)

    def free(self, worker: int, key: int, now_s: float, members: tuple[int, ...]) -> None:
        """Record that a pipeline rank has synchronised with these workers."""
        iteration, start_s, ended_s = self._open.pop((worker, key))
        self.rows[worker].append(
            SyncStep(
                iteration=iteration,
                pipeline_rank=key,
                start_s=max(start_s, 0.0),
                compute_s=ended_s - start_s,
                sync_wait_s=max(now_s - ended_s, 0.0),
                members=members or (worker,),
            )
        )


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


@dataclass
class Course:
    """One run of one strategy.

    Attributes:
        world: pipelines and links.
        slowdowns: slowdowns of iterations.
        training: the problem and the weights.
        observer: observes the weights.
        limit: iterations of all workers together after which the run ends.
        faults: workers that leave.
        recorder: records a trace, if wanted.
        done: iterations done, by worker.
        busy_s: seconds in which workers computed, all together.
        sent_bytes: bytes sent by all workers and servers.
    """

    world: World
    slowdowns: Slowdowns
    training: Training
    observer: Observer
    limit: int
    faults: tuple[SimulatedFault, ...]
    recorder: TraceRecorder | None
    done: list[int] = field(init=False)
    busy_s: float = 0.0
    sent_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.done = [0] * self.world.workers


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
