"""Figures of a machine from a few runs of it: how many figures these determine, and their values.

Two figures are open: the efficiency of products and the host's time of an operation. Runs whose
operations are about equally long tell only a mixture of both, of which a fit makes any pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.layouts_3d import Figures, Layout

STEPS, CLOSE = 4, 1e-3
"""Of calibration: most steps, and the relative change at which it ends."""
STEP = (0.05, 5.0)
"""By which the inverse of the efficiency and the host's time, in µs, change for a slope."""
LEAST = np.array([1.0, 0.0])
"""Values of the two: no product is faster than the peak, and no operation takes less than none."""
REPEATS = (
    (119.19, 130.43),  # 18B on a node, 21 February
    (120.18, 120.85, 121.48),  # 181B, 8/8/6/4, 21 to 23 February
    (123.69, 123.79),  # 181B, 4/8/12/4, 21 and 23 February
    (113.95, 114.11),  # 181B, 8/8/6/4, 25 and 26 February
    (110.42, 110.48, 113.54),  # 181B, 8/4/12/2, 25 and 26 February
    (118.12, 118.24),  # 182B, 8/8/6/4, 96 heads, 26 and 27 February
)
"""Seconds of an iteration of layouts that BigScience's prequel timed more than once
(``chronicles-prequel.md``, as :data:`benchmarks.published.layout_rows.PREQUEL`; equal sizes, heads,
batch and software)."""
MOST_HOST_ERROR = 1.0
"""Of the host's time, relative to the one before: beyond it a fit would know less than before."""
SEEN = 1e-6
"""Share of a slope below which it is rounding."""
MOST_TO_CALIBRATE = 3
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Calibrated:
    """What rows of a source give.

    Attributes:
        figures: at which they are predicted as measured, as near as may be.
        host_error: standard error of the host's time, relative to the one before, if both figures
            were fitted; infinite where the rows say nothing of it.
    """

    figures: Figures
    host_error: float

    @property
    def has_host_time(self) -> bool:
        """Whether the host's time of an operation is one of the fitted figures."""
        return self.host_error < MOST_HOST_ERROR


def calibrated(layouts: Sequence[Layout]) -> Calibrated:
    """Return the figures at which rows of one machine are predicted as measured.

    The efficiency of products is fitted to any rows, the host's time of an operation as well where
    they determine it (:func:`host_error`), by least squares of relative errors. Time is all but
    linear in the inverse of the efficiency and in the host's time, so that few steps of Gauss and
    Newton find them.

    Args:
        layouts: rows with a measured time, of one machine.
    """
    rows = layouts[:MOST_TO_CALIBRATE]
    start = rows[0].machine.figures
    measured = np.array([row.measured_s for row in rows], dtype=float)

    def off(values: Sequence[float]) -> FloatArray:
        """Return the predicted times over the measured ones, less one."""
        inverse, host_us = (*values, start.host_us)[:2]
        figures = Figures(1 / inverse, host_us)
        return np.array([row.predicted_s(figures) for row in rows]) / measured - 1

    before = np.array([1 / start.efficiency, start.host_us])
    error = host_error(_slopes(off, before, off(before)) * before)
    found = before if error < MOST_HOST_ERROR else before[:1]
    for _ in range(STEPS):
        at = off(found)
        slopes = _slopes(off, found, at)
        last, found = found, nearest(slopes, slopes @ found - at, LEAST)
        if np.allclose(found, last, rtol=CLOSE):
            break
    inverse, host_us = (*found, start.host_us)[:2]
    return Calibrated(Figures(float(1 / inverse), float(host_us)), error)


def host_error(slopes: FloatArray) -> float:
    """Return how far rows leave the host's time of an operation open, as a share of what it was.

    An efficiency explains a part of any change of the host's time. Only what it does not explain is
    seen, and a run that is repeated takes another time (:func:`repeated`): the standard error of
    the host's time in a fit of both figures is the one over the other. One row, or rows in which
    operations are equally long, say nothing.

    Args:
        slopes: relative change of the time of each row, by rows, for a relative change of the
            inverse of the efficiency and of the host's time, by columns.
    """
    efficiency, host = slopes.T
    left = host - efficiency * (efficiency @ host) / (efficiency @ efficiency)
    seen = float(np.linalg.norm(left))
    return repeated() / seen if seen > SEEN * float(np.linalg.norm(host)) else math.inf


def repeated() -> float:
    """Return the standard deviation of a published time, as a share of it: that of repeats."""
    squares = sum(float(np.var(row)) * len(row) / float(np.mean(row)) ** 2 for row in REPEATS)
    return math.sqrt(squares / sum(len(row) - 1 for row in REPEATS))


def nearest(slopes: FloatArray, wanted: FloatArray, least: FloatArray) -> FloatArray:
    """Return the figures, none below its least, whose predictions are nearest to what is wanted.

    Args:
        slopes: change of every row, by rows, for one of every figure, by columns; two at most.
        wanted: of every row.
        least: of every figure.
    """
    free, *_ = np.linalg.lstsq(slopes, wanted, rcond=None)
    if (free >= least[: len(free)]).all():
        return free
    if len(free) == 1:
        return least[:1]
    # The nearest point lies on an edge: one figure at its least, the other as well as may be.
    found = []
    for fixed, other in ((0, 1), (1, 0)):
        rest = wanted - slopes[:, fixed] * least[fixed]
        column = slopes[:, other]
        point = least.copy()
        point[other] = max(least[other], column @ rest / (column @ column))
        found.append((float(np.linalg.norm(slopes @ point - wanted)), point))
    return min(found, key=lambda row: row[0])[1]


def _slopes(
    off: Callable[[Sequence[float]], FloatArray], at: FloatArray, there: FloatArray
) -> FloatArray:
    """Return the change of every row, by rows, for one of every figure, by columns."""
    columns = []
    for number, step in enumerate(STEP[: len(at)]):
        moved = at.copy()
        moved[number] += step
        columns.append((off(moved) - there) / step)
    return np.array(columns).T
