"""All-reduces as the planner predicts them, beside measured ones, and latencies that suit both.

:func:`planner.costs.collectives.all_reduce_s` prices an all-reduce by its links alone. What a step
of it costs beside its bytes is a link's latency, and that is the one figure that may be moved: all
latencies by one factor, if messages and all-reduces together are predicted better so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from planner.artifacts.cluster import Cluster
from planner.costs.collectives import all_reduce_s
from planner.wiring.candidates import with_links
from planner.wiring.measured import Measurements, Reduction

FACTORS = tuple(2 ** (step / 8) for step in range(-16, 49))
"""Tried, from a quarter to 64 times."""
LEAST_GAIN = 0.05
"""Latencies stay as measured unless the error falls by this share."""
MESSAGES_WITHIN = 1.25
"""Single messages of all sizes stay predicted within this factor on average, where they were, and
elsewhere as they were."""


@dataclass(frozen=True)
class ReductionError:
    """An all-reduce and its seconds as predicted."""

    reduction: Reduction
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; above 1 where it took longer."""
        return self.reduction.seconds / self.predicted_s


@dataclass(frozen=True)
class Latencies:
    """What was done to latencies for the sake of all-reduces.

    Attributes:
        cluster: with the latencies taken.
        factor: from those of single messages; 1 if nothing was gained.
        message_error, reduction_error: mean factor by which predictions are off, of single
            messages and of all-reduces, as taken; None where none were measured.
        message_error_before, reduction_error_before: with the latencies of single messages.
    """

    cluster: Cluster
    factor: float
    message_error: float | None
    reduction_error: float | None
    message_error_before: float | None
    reduction_error_before: float | None


def reduction_errors(
    cluster: Cluster, reductions: Sequence[Reduction]
) -> tuple[ReductionError, ...]:
    """Predictions beside measurements; those without a path are left out."""
    found = (
        ReductionError(row, all_reduce_s(cluster, row.devices, row.bytes_)) for row in reductions
    )
    return tuple(error for error in found if 0 < error.predicted_s < math.inf)


def suited_latencies(cluster: Cluster, found: Measurements) -> Latencies:
    """The cluster with latencies that predict messages and all-reduces best together.

    Messages and all-reduces weigh the same, each by the mean of its errors' logarithms. Messages of
    all measured sizes count and hold latencies in place: see :data:`MESSAGES_WITHIN`.
    """
    before = _errors(cluster, found)
    best, factor, errors = cluster, 1.0, before
    if before[1] is not None:
        most = max(before[0] or 0.0, math.log(MESSAGES_WITHIN))
        for tried in FACTORS:
            scaled = _scaled(cluster, tried)
            wrong = _errors(scaled, found)
            if (wrong[0] or 0.0) <= most and _sum(wrong) < _sum(errors) * (1 - 1e-9):
                best, factor, errors = scaled, tried, wrong
    if _sum(errors) > _sum(before) * (1 - LEAST_GAIN):
        best, factor, errors = cluster, 1.0, before
    told = [None if error is None else math.exp(error) for error in (*errors, *before)]
    return Latencies(best, factor, *told)


def _scaled(cluster: Cluster, factor: float) -> Cluster:
    return with_links(
        cluster,
        lambda index: {"latency_us": float(f"{cluster.links[index].latency_us * factor:.5g}")},
    )


def _sum(errors: tuple[float | None, float | None]) -> float:
    return sum(error for error in errors if error is not None)


def _errors(cluster: Cluster, found: Measurements) -> tuple[float | None, float | None]:
    """Mean size of the logarithm of predicted over measured: of messages, of all-reduces."""
    messages = list(_message_logarithms(cluster, found))
    reductions = [
        abs(math.log(error.ratio)) for error in reduction_errors(cluster, found.reductions)
    ]
    return (mean(messages) if messages else None, mean(reductions) if reductions else None)


def _message_logarithms(cluster: Cluster, found: Measurements) -> Iterator[float]:
    for ends, way in found.ways.items():
        route = cluster.route(*ends)
        if route is None:
            continue
        for bytes_, seconds in way.message_s.items():
            predicted_s = route.seconds(bytes_)
            if seconds > 0 and predicted_s > 0:
                yield abs(math.log(predicted_s / seconds))
