"""Latency and bandwidth from one device to another, fitted to messages that are answered.

A message takes latency + bytes / bandwidth (Hockney 1994). Machines have no common clock, so the
sender times a message and a short answer to it: the shortest takes two latencies, and the others
give the bandwidth of their direction. All figures are medians, so that a few disturbed messages
change nothing. If most are disturbed, because others use the machines, the fastest of equal
messages is closer to the link, since nothing makes a message faster than its link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles

from planner.errors import PipeplanError

Samples = Mapping[int, Sequence[float]]
"""Seconds from the start of a message to the end of its answer, by the message's bytes."""
OfEqual = Callable[[Sequence[float]], float]
"""Statistic for messages of equal size: the median or the least."""


@dataclass(frozen=True)
class OneWay:
    """Messages from one device to another on an otherwise idle network.

    Attributes:
        source, target: names of the devices.
        latency_s: half the time of the shortest message and its answer.
        bandwidth_gb_per_s: bandwidth of longer messages, decimal.
        latency_spread, bandwidth_spread: half the interquartile range of all samples as a fraction
            of the median; of bandwidth among the longest messages.
        message_s: seconds in this direction by bytes, without the time of the answer.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_gb_per_s: float
    latency_spread: float
    bandwidth_spread: float
    message_s: Mapping[int, float]


def fit_one_way(source: str, target: str, samples: Samples, of_equal: OfEqual = median) -> OneWay:
    """Fit latency and bandwidth to messages of several sizes.

    The seconds per byte are the median slope over all pairs of sizes (Theil 1950, Sen 1968).

    Args:
        source: name of the sending device.
        target: name of the answering device.
        samples: samples of two sizes or more; the answers had the smallest size.
        of_equal: statistic for messages of one size.

    Raises:
        PipeplanError: if there is only one size, or longer messages took no longer.
    """
    if len(samples) < 2 or not all(samples.values()):
        raise PipeplanError(
            f"{source} > {target}: measured messages of {len(samples)} size; two or more are "
            "needed to separate latency from bandwidth"
        )
    middle = {bytes_: of_equal(samples[bytes_]) for bytes_ in sorted(samples)}
    (least, answered_s), *_, (most, _) = middle.items()
    slope = median((middle[b] - middle[a]) / (b - a) for a, b in combinations(middle, 2))
    if slope <= 0:
        raise PipeplanError(
            f"{source} > {target}: {most:,} bytes took no longer than {least:,}; measure larger "
            "messages (--most-mib) or repeat more (--repeats)"
        )
    moving_s = [max(s - answered_s, slope) for s in samples[most]]
    return OneWay(
        source,
        target,
        answered_s / 2,
        1e-9 / slope,
        spread(samples[least]),
        spread(moving_s),
        {bytes_: max(s - answered_s / 2, 0.0) for bytes_, s in middle.items()},
    )


def spread(values: Sequence[float]) -> float:
    """Return half the interquartile range as a fraction of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0
