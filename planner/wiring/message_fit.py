"""Latency and bandwidth one way between two devices, from messages that are answered.

A message takes latency + bytes / bandwidth (Hockney 1994). No two machines share a clock, so the
sender times a message and a short answer to it: the time of the shortest is two latencies, and the
others tell the bandwidth of their way alone. Everything is a median, so that a few messages that
were disturbed change nothing; where most are, because others use the machines, the fastest of equal
messages is nearer to what a link does, as nothing makes a message faster than its link.
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
"""What counts of the seconds of equal messages: their median, or the least."""


@dataclass(frozen=True)
class OneWay:
    """Messages from one device to another while nothing else talks.

    Attributes:
        source, target: names.
        latency_s: half the time of the shortest message and its answer.
        bandwidth_gb_per_s: what longer messages add, decimal.
        latency_spread, bandwidth_spread: half the range of the middle half of all samples, as a
            share of the median; of bandwidth among the longest messages.
        message_s: one way, by bytes; what the answer took is taken off.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_gb_per_s: float
    latency_spread: float
    bandwidth_spread: float
    message_s: Mapping[int, float]


def fit_one_way(source: str, target: str, samples: Samples, of_equal: OfEqual = median) -> OneWay:
    """Latency and bandwidth from messages of several sizes.

    The seconds a byte are the median slope over all pairs of sizes (Theil 1950, Sen 1968).

    Args:
        source: name of the sending device.
        target: of the answering one.
        samples: of two sizes or more; the answers were of the least size.
        of_equal: what counts of messages of one size.

    Raises:
        PipeplanError: if there is one size only, or longer messages took no longer.
    """
    if len(samples) < 2 or not all(samples.values()):
        raise PipeplanError(
            f"{source} > {target}: measured messages of {len(samples)} size; two or more tell "
            "latency from bandwidth"
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
    """Half the range of the middle half, as a share of the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0
