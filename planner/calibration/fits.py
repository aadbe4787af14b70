"""Latency and bandwidth between two devices from the times of their messages.

A message takes latency plus bytes over bandwidth (Hockney 1994). Messages of several sizes tell
the two apart. Of one size they do not, and what is put down to the wrong one of the two spoils
predictions of other sizes: a wrong latency by the same few milliseconds for every message, a wrong
bandwidth by a factor, which for an all-reduce a thousand times as large is a thousand times as
much. Hence the rule for messages of one size: where an all-reduce crossed the same links it is the
second size, bandwidth falls no lower than its time proves and latency takes the rest; without one,
what a short message took longer or less than predicted is latency, what a long one did is
bandwidth (:func:`is_short`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from planner.artifacts.routing import Route
from planner.calibration.transfers import Ends, TransferSamples

AGREEMENT = 1e-3
"""A share of a time below which measured and predicted count as equal."""
SPREAD_OF_SIZES = 1.25
"""Between the largest and the smallest message, to tell latency from bandwidth."""
LEAST_SHARE = 0.1
"""Of a message's predicted time without latency; below it the latency must be wrong too."""
SHORT_S = 1e-3
"""What posting, waking up and copying may cost a message, whatever its size."""
UNTOLD = frozenset({"scaled", "latency", "all-reduce"})
"""Methods of pairs whose messages did not tell latency from bandwidth."""


@dataclass(frozen=True)
class PairFit:
    """What the transfers between two devices say, in both directions.

    ``method`` is "agrees", "fitted" (latency and bandwidth, from several sizes), or for one size
    "scaled" (bandwidth, or both where that is too little), "latency" (all of the difference) or
    "all-reduce" (bandwidth from an all-reduce, the rest is latency).
    """

    ends: Ends
    latency_s: float
    bandwidth_gb_per_s: float
    method: str
    samples: int


def fit_pair(
    ends: Ends, route: Route, samples: TransferSamples, least_gb_per_s: float = 0.0
) -> PairFit:
    """Latency and bandwidth between two devices.

    Args:
        ends: the devices.
        route: between them, before.
        samples: seconds of messages by their bytes; none of 0 bytes, none of 0 s.
        least_gb_per_s: what all-reduces prove that every link of the route carries; 0 if none
            does. It counts where the messages are of one size.
    """
    count = sum(map(len, samples.values()))
    points = {bytes_: median(seconds) for bytes_, seconds in samples.items()}
    if all(_agrees(s, route.seconds(bytes_)) for bytes_, s in points.items()):
        return PairFit(ends, route.latency_s, route.bandwidth_gb_per_s, "agrees", count)
    line = _line(points, {bytes_: len(seconds) for bytes_, seconds in samples.items()})
    if line is not None:
        return PairFit(ends, line[0], 1e-9 / line[1], "fitted", count)
    return PairFit(ends, *_of_one_size(route, points, least_gb_per_s), count)


def is_short(moving_s: float, latency_s: float) -> bool:
    """Whether a message, or all-reduce, says more of latency than of bandwidth.

    Its bytes alone should take less than the latency (it is below Hockney's half-performance
    length) or less than what software costs a message.
    """
    return moving_s < max(latency_s, SHORT_S)


def _agrees(found_s: float, expected_s: float) -> bool:
    return abs(found_s - expected_s) <= AGREEMENT * expected_s


def _moving_s(bytes_: float, width_gb_per_s: float) -> float:
    return bytes_ / (width_gb_per_s * 1e9)


def _latency_s(points: Mapping[int, float], width_gb_per_s: float) -> float:
    """What a bandwidth leaves of the messages' times."""
    return median(s - _moving_s(bytes_, width_gb_per_s) for bytes_, s in points.items())


def _line(points: Mapping[int, float], weights: Mapping[int, int]) -> tuple[float, float] | None:
    """Latency in seconds and seconds a byte by weighted least squares, neither negative.

    None where the sizes are too alike to tell them apart, or larger messages took no longer.
    """
    if max(points) < SPREAD_OF_SIZES * min(points):
        return None
    total = sum(weights.values())
    mean_bytes = sum(weights[x] * x for x in points) / total
    mean_s = sum(weights[x] * s for x, s in points.items()) / total
    spread = sum(weights[x] * (x - mean_bytes) ** 2 for x in points)
    slope = sum(weights[x] * (x - mean_bytes) * (s - mean_s) for x, s in points.items()) / spread
    latency_s = mean_s - slope * mean_bytes
    if latency_s < 0:
        squares = sum(weights[x] * x * x for x in points)
        latency_s = 0.0
        slope = sum(weights[x] * x * s for x, s in points.items()) / squares
    return (latency_s, slope) if slope > 0 else None


def _of_one_size(
    route: Route, points: Mapping[int, float], least_gb_per_s: float
) -> tuple[float, float, str]:
    """Latency in seconds, bandwidth in GB/s and the method; the rule is the module's."""
    latency_s, width = _scaled(route, points)
    method = "scaled"
    given = route.bandwidth_gb_per_s
    # Short messages that were slow may mean a narrow link after all if an all-reduce was slow too.
    if is_short(_moving_s(max(points), given), route.latency_s) and (
        not least_gb_per_s or width > given
    ):
        kept_s = _latency_s(points, given)
        if kept_s >= 0:
            latency_s, width, method = kept_s, given, "latency"
    if least_gb_per_s > width:
        return max(0.0, _latency_s(points, least_gb_per_s)), least_gb_per_s, "all-reduce"
    return latency_s, width, method


def _scaled(route: Route, points: Mapping[int, float]) -> tuple[float, float]:
    """Latency as it is, bandwidth as the messages say; both scaled where that is too little."""
    scales = []
    for bytes_, found_s in points.items():
        moving_s = _moving_s(bytes_, route.bandwidth_gb_per_s)
        if found_s - route.latency_s < LEAST_SHARE * moving_s:
            factor = median(s / route.seconds(x) for x, s in points.items())
            return route.latency_s * factor, route.bandwidth_gb_per_s / factor
        scales.append((found_s - route.latency_s) / moving_s)
    return route.latency_s, route.bandwidth_gb_per_s / median(scales)
