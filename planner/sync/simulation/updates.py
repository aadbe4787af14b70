"""How workers in step move the parameters that they share."""

from __future__ import annotations

import numpy as np

from planner.artifacts.link_table import FloatArray, IntArray
from planner.sync.simulation.training import Training
from planner.sync.strategies import CrossIterationOptions


class ExactUpdate:
    """One step of SGD with momentum on the mean of all workers' gradients.

    What all-reduce, its fused and its decoupled form and the synchronous parameter server compute.
    """

    staleness = 0

    def __init__(self, training: Training) -> None:
        self._weights: FloatArray = training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """The workers hold equal weights, so that their batches are one large one."""
        gradient = training.mean_gradient(self._weights, workers, iteration)
        self._velocity = training.learning.momentum * self._velocity + gradient
        self._weights = self._weights - training.learning.learning_rate * self._velocity

    def models(self) -> FloatArray:
        """The parameters."""
        return self._weights[None]


class CrossIterationUpdate:
    """Gradients at an approximation of the parameters, while the last mean is on its way.

    With w and v the parameters and momentum that hold the means of all iterations but the last, an
    iteration begins on w - rate * (momentum * v + u): u is the worker's own last gradient, or the
    last mean that is there.
    """

    staleness = 1

    def __init__(self, training: Training, options: CrossIterationOptions) -> None:
        self._weights: FloatArray = training.weights[0].copy()
        self._velocity = np.zeros_like(self._weights)
        self._own = np.zeros_like(training.weights)
        self._on_its_way = np.zeros_like(self._weights)
        self._arrived = np.zeros_like(self._weights)
        self._uses_own = options.approximation == "own_gradient"

    def run(self, training: Training, workers: IntArray, iteration: int) -> None:
        """Gradients of this iteration; then the mean of the last one arrives."""
        learning = training.learning
        at_hand = self._own[workers] if self._uses_own else self._arrived
        ahead = learning.momentum * self._velocity + at_hand
        begun = np.broadcast_to(
            self._weights - learning.learning_rate * ahead if iteration > 1 else self._weights,
            (len(workers), len(self._weights)),
        )
        found = training.own_gradients(np.ascontiguousarray(begun), workers, iteration)
        if iteration > 1:
            self._arrive(training)
        self._own[workers] = found
        self._on_its_way = found.mean(axis=0)

    def _arrive(self, training: Training) -> None:
        self._arrived = self._on_its_way
        self._velocity = training.learning.momentum * self._velocity + self._arrived
        self._weights = self._weights - training.learning.learning_rate * self._velocity

    def models(self) -> FloatArray:
        """The parameters with all means that have arrived."""
        return self._weights[None]
