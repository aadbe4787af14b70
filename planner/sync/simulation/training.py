"""Training of a small problem in virtual time, with the gradients of many workers in batches.

A gradient depends only on the weights with which a worker began its iteration and on its samples,
so it is registered first. When one of the registered gradients is needed, all are computed in one
batch; with N workers that is one batch for about N gradients.

The problem is classification by a network of two layers, not convex, on a fixed data set with wrong
labels; real enough that staleness and disagreement have their cost, small enough for millions of
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cluster.link_table import FloatArray, IntArray

Bits = NDArray[np.uint64]
INPUTS, HIDDEN, CLASSES = 8, 8, 4
SAMPLES = 4096
PIECE = 64
WRONG_LABELS = 0.1
DIMENSION = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
"""Number of parameters, including both biases."""
_SPLIT = (INPUTS + 1) * HIDDEN


class LearningProblem:
    """The data set, the loss and its gradients. Labels come from a network of the same form.

    Args:
        seed: seed of the data and of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng((seed, 3))
        self.inputs = self._drawn_inputs(draw)
        teacher = draw.normal(size=DIMENSION) * 2
        self.targets = self._labels(draw, self.inputs, teacher)
        self.start: FloatArray = draw.normal(size=DIMENSION) * 0.3
        draw = np.random.default_rng((seed, 6))
        self._held_out_inputs = self._drawn_inputs(draw)
        self._held_out_targets = self._labels(draw, self._held_out_inputs, teacher)
        self._salt = np.array([seed * int(_ODD) % 2**64], dtype=np.uint64)

    def samples_of(
        self, workers: NDArray[np.int64], iterations: NDArray[np.int64], batch: int
    ) -> NDArray[np.int64]:
        """Return the samples of workers' iterations: one row for each (worker, iteration)."""
        key = workers.astype(np.uint64) << np.uint64(32) | iterations.astype(np.uint64)
        offsets: Bits = np.arange(batch, dtype=np.uint64)
        each: Bits = np.add(key[:, None] * np.uint64(batch), offsets, dtype=np.uint64)
        return (_mixed(each ^ self._salt) % np.uint64(SAMPLES)).astype(np.int64)

    def gradients(self, weights: FloatArray, samples: NDArray[np.int64]) -> FloatArray:
        """Return the gradients of the mean loss over batches.

        Args:
            weights: one row of parameters for each batch.
            samples: one row of sample numbers for each batch.
        """
        inputs = self.inputs[samples]
        hidden, scores = self._outputs(weights, inputs)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        scores -= self.targets[samples]
        scores /= samples.shape[1]
        found = np.empty_like(weights)
        count, second = len(weights), weights[:, _SPLIT:].reshape(-1, HIDDEN + 1, CLASSES)
        found[:, _SPLIT:] = (hidden.transpose(0, 2, 1) @ scores).reshape(count, -1)
        back = scores @ second[:, :HIDDEN].transpose(0, 2, 1)
        back *= 1 - hidden[..., :HIDDEN] ** 2
        found[:, :_SPLIT] = (inputs.transpose(0, 2, 1) @ back).reshape(count, -1)
        return found

    @staticmethod
    def _drawn_inputs(draw: np.random.Generator) -> FloatArray:
        inputs: FloatArray = draw.normal(size=(SAMPLES, INPUTS + 1))
        inputs[:, INPUTS] = 1.0
        return inputs

    def _labels(
        self, draw: np.random.Generator, inputs: FloatArray, teacher: FloatArray
    ) -> FloatArray:
        """Return the teacher's classes of samples, some of them wrong."""
        labels = self._outputs(teacher[None], inputs[None])[1][0].argmax(axis=-1)
        wrong = draw.random(SAMPLES) < WRONG_LABELS
        labels = np.where(wrong, draw.integers(CLASSES, size=SAMPLES), labels)
        return np.asarray(np.eye(CLASSES)[labels])

    def loss(self, weights: FloatArray) -> float:
        """Return the mean cross entropy of one model over all samples of the training."""
        return self._loss(weights, self.inputs, self.targets)

    def held_out_loss(self, weights: FloatArray) -> float:
        """Return the mean cross entropy of one model over as many samples that no worker sees."""
        return self._loss(weights, self._held_out_inputs, self._held_out_targets)

    def _loss(self, weights: FloatArray, inputs: FloatArray, targets: FloatArray) -> float:
        # In pieces too small for the linear algebra's own threads, which only disturb here.
        pieces = inputs.reshape(-1, PIECE, INPUTS + 1)
        scores = self._outputs(weights[None], pieces)[1].reshape(SAMPLES, CLASSES)
        most = scores.max(axis=-1, keepdims=True)
        logs = scores - most - np.log(np.exp(scores - most).sum(axis=-1, keepdims=True))
        return float(-(logs * targets).sum() / SAMPLES)

    @staticmethod
    def _outputs(weights: FloatArray, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return hidden values with a 1 for the bias, and scores of the classes."""
        first = weights[:, :_SPLIT].reshape(-1, INPUTS + 1, HIDDEN)
        second = weights[:, _SPLIT:].reshape(-1, HIDDEN + 1, CLASSES)
        hidden = np.empty((*inputs.shape[:2], HIDDEN + 1))
        hidden[..., HIDDEN] = 1.0
        np.tanh(inputs @ first, out=hidden[..., :HIDDEN])
        return hidden, hidden @ second


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mixed(bits: Bits) -> Bits:
    """SplitMix64 (Steele et al. 2014): maps neighbouring numbers to unrelated ones."""
    with np.errstate(over="ignore"):
        bits = bits * _ODD
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True)
class Learning:
    """Hyperparameters of the simulated training.

    Attributes:
        learning_rate: learning rate of stochastic gradient descent.
        momentum: heavy ball, of each worker or of the server.
        batch: samples of a worker's iteration.
        seed: seed of the data, the initial weights and the traces.
    """

    learning_rate: float = 0.05
    momentum: float = 0.9
    batch: int = 8
    seed: int = 0


class Training:
    """The weights of all workers, one row each.

    Args:
        workers: number of workers.
        learning: rates and seed.
    """

    def __init__(self, workers: int, learning: Learning) -> None:
        self.problem = LearningProblem(learning.seed)
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
        """Start an iteration of a worker with its current weights."""
        self._begun[worker] = self.weights[worker]
        self._iterations[worker] = iteration
        if not self._is_pending[worker]:
            self._is_pending[worker] = True
            self._pending.append(worker)

    def gradient(self, worker: int) -> FloatArray:
        """Return the gradient of the worker's last iteration."""
        if self._is_pending[worker]:
            self._compute()
        return np.asarray(self._gradients[worker])

    def step(self, worker: int, part: slice) -> None:
        """Apply the worker's own optimizer step to a part of its weights."""
        if self._is_pending[worker]:
            self._compute()
        row = self.weights[worker, part]
        row -= self._updates[worker, part]

    def _compute(self) -> None:
        """Compute all registered gradients and the steps with their workers' momentum."""
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

    def own_gradients(self, weights: FloatArray, workers: IntArray, iteration: int) -> FloatArray:
        """Return the gradients of several workers, each with its own model."""
        iterations = np.full(len(workers), iteration)
        samples = self.problem.samples_of(workers, iterations, self.learning.batch)
        return self.problem.gradients(weights, samples)

    def heal(self, worker: int, alive: list[bool]) -> None:
        """Copy a peer's weights to a returning worker, which begins without momentum."""
        donor = next((peer for peer, there in enumerate(alive) if there and peer != worker), worker)
        self.weights[worker] = self.weights[donor]
        self._velocity[worker] = 0.0


def parts_of(bytes_by_place: tuple[int, ...], dimension: int = DIMENSION) -> tuple[slice, ...]:
    """Divide the problem's parameters among ranks in proportion to the model's bytes."""
    total = sum(bytes_by_place) or 1
    ends = np.cumsum(bytes_by_place) / total * dimension
    edges = [0, *np.round(ends).astype(int).tolist()]
    edges[-1] = dimension
    return tuple(slice(a, b) for a, b in pairwise(edges))
