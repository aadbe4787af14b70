"""DAPPLE's latency of a synchronous pipeline (Fan et al., PPoPP 2021, section 4.1).

L = Tw + Ts + Te. With the pivot stage Q, the one with the fewest bubbles:

    Tw = sum of F_i for i <= Q: until the pivot's first forward has ended;
    Ts = (M - 1) * (F_Q + B_Q): the pivot's steady phase;
    Te = max over i of AR_i + (sum of B_a for i <= a <= Q, if i <= Q;
                               minus the sum of B_a for Q < a < i, if i > Q).

The pivot is the last stage at first; going towards the first stage, s becomes the pivot if
(M - 1) * (F_s + B_s) > (M - 1) * (F_Q + B_Q) + sum of F_a + B_a for s < a < Q. Channels are stages
without an all-reduce. The sums' limits in Te are our reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.partition.chain import FloatArray, IntArray


class LatencyStage(NamedTuple):
    """Seconds of one microbatch of a stage, or of many stages, and of its all-reduce."""

    forward_s: FloatArray
    backward_s: FloatArray
    all_reduce_s: FloatArray

    @property
    def both_s(self) -> FloatArray:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def at(self, *index: IntArray) -> LatencyStage:
        """Return some of the stages."""
        return LatencyStage(*(array[index] for array in self))


@dataclass
class Latency:
    """What a longer pipeline's latency needs to know of a shorter one; arrays of equal shape.

    Attributes:
        warm_up_s: Tw.
        pivot_s: F_Q + B_Q.
        forward_after_s: forwards of the stages after the pivot.
        backward_after_s: their backwards.
        ending_s: Te.
        rival_s: the best steady phase of a stage after the pivot, less the work after it.
    """

    warm_up_s: FloatArray
    pivot_s: FloatArray
    forward_after_s: FloatArray
    backward_after_s: FloatArray
    ending_s: FloatArray
    rival_s: FloatArray

    @classmethod
    def nothing(cls, size: int) -> Latency:
        """Return pipelines without a stage."""
        zero = [np.zeros(size) for _ in range(5)]
        return cls(zero[0], zero[1], zero[2], zero[3], zero[4], np.full(size, -np.inf))

    def rows(self, indices: IntArray) -> Latency:
        """Return some of the pipelines."""
        return Latency(*(array[indices] for array in self._arrays()))

    def columns(self) -> Latency:
        """Return the pipelines as columns, to be extended by a matrix of stages."""
        return Latency(*(array[:, None] for array in self._arrays()))

    def put(self, targets: IntArray, new: Latency) -> None:
        """Replace some of the pipelines."""
        for own, other in zip(self._arrays(), new._arrays(), strict=True):
            own[targets] = other

    def _arrays(self) -> tuple[FloatArray, ...]:
        return (
            self.warm_up_s,
            self.pivot_s,
            self.forward_after_s,
            self.backward_after_s,
            self.ending_s,
            self.rival_s,
        )

    def total_s(self, microbatches: int) -> FloatArray:
        """Return Tw + Ts + Te."""
        return self.warm_up_s + (microbatches - 1) * self.pivot_s + self.ending_s


def extended(latency: Latency, stage: LatencyStage, microbatches: int) -> Latency:
    """Return the pipelines with one more stage at the end; shapes are broadcast.

    The old pivot has won against every other stage. It stays if it wins against the new last stage,
    or if a stage between them does, which then loses to the old pivot.
    """
    forward_s, backward_s, all_reduce_s = stage
    own_s = stage.both_s
    stays = _pivot_stays(latency, own_s, microbatches)
    warm_up_s = latency.warm_up_s + latency.forward_after_s + forward_s
    before_s = latency.ending_s + latency.backward_after_s + backward_s
    return Latency(
        np.where(stays, latency.warm_up_s, warm_up_s),
        np.where(stays, latency.pivot_s, own_s),
        np.where(stays, latency.forward_after_s + forward_s, 0.0),
        np.where(stays, latency.backward_after_s + backward_s, 0.0),
        np.where(
            stays,
            np.maximum(latency.ending_s, all_reduce_s - latency.backward_after_s),
            np.maximum(before_s, all_reduce_s + backward_s),
        ),
        np.where(stays, np.maximum(latency.rival_s - own_s, (microbatches - 1) * own_s), -np.inf),
    )


def _pivot_stays(latency: Latency, own_s: FloatArray, microbatches: int) -> NDArray[np.bool_]:
    steady_s = (microbatches - 1) * own_s
    after_s = latency.forward_after_s + latency.backward_after_s
    wins = (microbatches - 1) * latency.pivot_s - after_s > steady_s
    return np.asarray(wins | (latency.rival_s > steady_s))


def total_with(latency: Latency, stage: LatencyStage, microbatches: int) -> FloatArray:
    """Return the latency of :func:`extended` alone, which suffices for most pipelines."""
    own_s = stage.both_s
    old_s = latency.warm_up_s + (microbatches - 1) * latency.pivot_s
    stays_s = old_s + np.maximum(latency.ending_s, stage.all_reduce_s - latency.backward_after_s)
    warm_up_s = latency.warm_up_s + latency.forward_after_s
    before_s = latency.ending_s + latency.backward_after_s
    moves_s = warm_up_s + microbatches * own_s + np.maximum(before_s, stage.all_reduce_s)
    return np.where(_pivot_stays(latency, own_s, microbatches), stays_s, moves_s)
