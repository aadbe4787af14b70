"""Training in virtual time: every worker's weights, and gradients computed many at once.

A gradient depends on nothing but the weights a worker began its iteration on and its samples, so
it is only registered then. When the first of them is needed, all that are registered are computed
in one batch; with N workers that is one batch for about N gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.artifacts.link_table import FloatArray, IntArray
from planner.sync.simulation.problem import Problem


@dataclass(frozen=True)
class Learning:
    """How the problem is learned.

    Attributes:
        learning_rate: of stochastic gradient descent.
        momentum: heavy ball, of each worker or of the server.
        batch: samples of a worker's iteration.
        seed: of the data, the initial weights and the traces.
    """

    learning_rate: float = 0.05
    momentum: float = 0.9
    batch: int = 8
    seed: int = 0


class Training:
    """The weights of all workers, one row each.

    Args:
        workers: number of them.
        learning: rates and seed.
    """

    def __init__(self, workers: int, learning: Learning) -> None:
        self.problem = Problem(learning.seed)
        self.learning = learning
        self.weights: FloatArray = np.tile(self.problem.start, (workers, 1))
        self._begun = self.weights.copy()
        self._gradients = np.zeros_like(self.weights)
        self._velocity = np.zeros_like(self.weights)
        self._updates = np.zeros_like(self.weights)
        self._pending: list[int] = []
        self._is_pending = [False] * workers
        self._iterations = np.zeros(workers, dtype=np.int64)

    def begin(self, worker: int, iteration: int) -> None:
        """The worker starts an iteration on the weights it has now."""
        self._begun[worker] = self.weights[worker]
        self._iterations[worker] = iteration
        if not self._is_pending[worker]:
            self._is_pending[worker] = True
            self._pending.append(worker)

    def gradient(self, worker: int) -> FloatArray:
        """Of the iteration that the worker began last."""
        if self._is_pending[worker]:
            self._compute()
        row: FloatArray = self._gradients[worker]
        return row

    def step(self, worker: int, part: slice) -> None:
        """Apply the worker's own optimizer step to a part of its weights."""
        if self._is_pending[worker]:
            self._compute()
        row = self.weights[worker, part]
        row -= self._updates[worker, part]

    def _compute(self) -> None:
        """All registered gradients, and the steps that their workers' momentum makes of them."""
        rows = np.array(self._pending)
        samples = self.problem.samples_of(rows, self._iterations[rows], self.learning.batch)
        gradients = self.problem.gradients(self._begun[rows], samples)
        velocity = self.learning.momentum * self._velocity[rows] + gradients
        self._gradients[rows] = gradients
        self._velocity[rows] = velocity
        self._updates[rows] = self.learning.learning_rate * velocity
        for worker in self._pending:
            self._is_pending[worker] = False
        self._pending.clear()

    def mean_gradient(self, weights: FloatArray, workers: IntArray, iteration: int) -> FloatArray:
        """Of one model over the samples of several workers' iterations.

        Args:
            weights: of the model.
            workers: their numbers.
            iteration: of all of them.
        """
        every = np.broadcast_to(weights, (len(workers), len(weights)))
        return np.asarray(self.own_gradients(every, workers, iteration).mean(axis=0))

    def own_gradients(self, weights: FloatArray, workers: IntArray, iteration: int) -> FloatArray:
        """Of a model of its own for each of several workers."""
        iterations = np.full(len(workers), iteration)
        samples = self.problem.samples_of(workers, iterations, self.learning.batch)
        return self.problem.gradients(weights, samples)

    def heal(self, worker: int, alive: list[bool]) -> None:
        """A worker that comes back copies a peer's weights and begins without momentum."""
        donor = next((peer for peer, there in enumerate(alive) if there and peer != worker), worker)
        self.weights[worker] = self.weights[donor]
        self._velocity[worker] = 0.0


def parts_of(bytes_by_place: tuple[int, ...], dimension: int) -> tuple[slice, ...]:
    """The problem's parameters divided among the places as the model's bytes are."""
    total = sum(bytes_by_place) or 1
    ends = np.cumsum(bytes_by_place) / total * dimension
    edges = [0, *np.round(ends).astype(int).tolist()]
    edges[-1] = dimension
    return tuple(slice(a, b) for a, b in pairwise(edges))
