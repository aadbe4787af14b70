"""A small learning problem whose gradients of many workers are computed at once.

Classification by a network of two layers, not convex, on a fixed data set with wrong labels; real
enough that staleness and disagreement cost what they cost, small enough for millions of steps.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.artifacts.link_table import FloatArray

Bits = NDArray[np.uint64]
INPUTS, HIDDEN, CLASSES = 8, 8, 4
SAMPLES = 4096
PIECE = 64
WRONG_LABELS = 0.1
DIMENSION = (INPUTS + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
"""Parameters, both biases included."""
_SPLIT = (INPUTS + 1) * HIDDEN


class Problem:
    """The data set, the loss and its gradients. Labels come from a network of the same form.

    Args:
        seed: of the data and of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng((seed, 3))
        self.inputs: FloatArray = draw.normal(size=(SAMPLES, INPUTS + 1))
        self.inputs[:, INPUTS] = 1.0
        teacher = draw.normal(size=DIMENSION) * 2
        labels = self._outputs(teacher[None], self.inputs[None])[1][0].argmax(axis=-1)
        wrong = draw.random(SAMPLES) < WRONG_LABELS
        labels = np.where(wrong, draw.integers(CLASSES, size=SAMPLES), labels)
        self.targets: FloatArray = np.eye(CLASSES)[labels]
        self.start: FloatArray = draw.normal(size=DIMENSION) * 0.3
        self._salt = np.array([seed * int(_ODD) % 2**64], dtype=np.uint64)

    def samples_of(
        self, workers: NDArray[np.int64], iterations: NDArray[np.int64], batch: int
    ) -> NDArray[np.int64]:
        """Which samples a worker's iteration sees: one row for each (worker, iteration)."""
        key = workers.astype(np.uint64) << np.uint64(32) | iterations.astype(np.uint64)
        places: Bits = np.arange(batch, dtype=np.uint64)
        each: Bits = np.add(key[:, None] * np.uint64(batch), places, dtype=np.uint64)
        return (_mixed(each ^ self._salt) % np.uint64(SAMPLES)).astype(np.int64)

    def gradients(self, weights: FloatArray, samples: NDArray[np.int64]) -> FloatArray:
        """Of the mean loss over a batch.

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

    def loss(self, weights: FloatArray) -> float:
        """Mean cross entropy of one model over the whole data set."""
        # In pieces too small for the linear algebra's own threads, which only disturb here.
        pieces = self.inputs.reshape(-1, PIECE, INPUTS + 1)
        scores = self._outputs(weights[None], pieces)[1].reshape(SAMPLES, CLASSES)
        most = scores.max(axis=-1, keepdims=True)
        logs = scores - most - np.log(np.exp(scores - most).sum(axis=-1, keepdims=True))
        return float(-(logs * self.targets).sum() / SAMPLES)

    @staticmethod
    def _outputs(weights: FloatArray, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Hidden values with a 1 for the bias, and scores of the classes."""
        first = weights[:, :_SPLIT].reshape(-1, INPUTS + 1, HIDDEN)
        second = weights[:, _SPLIT:].reshape(-1, HIDDEN + 1, CLASSES)
        hidden = np.empty((*inputs.shape[:2], HIDDEN + 1))
        hidden[..., HIDDEN] = 1.0
        np.tanh(inputs @ first, out=hidden[..., :HIDDEN])
        return hidden, hidden @ second

    @cached_property
    def dimension(self) -> int:
        """Number of parameters."""
        return DIMENSION


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mixed(bits: Bits) -> Bits:
    """SplitMix64 (Steele et al. 2014): neighbouring numbers become unrelated ones."""
    with np.errstate(over="ignore"):
        bits = bits * _ODD
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
