"""Measured messages, concurrent messages and all-reduces of a cluster, and figures of its pairs.

A message takes latency + bytes / bandwidth (Hockney 1994). Machines have no common clock, so the
sender times a message and a short answer to it: the shortest takes two latencies, and the others
give the bandwidth of their direction. All figures are medians, so that a few disturbed messages
change nothing. If most are disturbed, because others use the machines, the fastest of equal
messages is closer to the link, since nothing makes a message faster than its link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from statistics import fmean, harmonic_mean, median, quantiles

from planner.cluster.cluster_file import Host
from planner.cluster.hardware import DeviceType
from planner.errors import PipeplanError
from planner.units import significant

Ends = tuple[str, str]
Samples = Mapping[int, Sequence[float]]
"""Seconds from the start of a message to the end of its answer, by the message's bytes."""
OfEqual = Callable[[Sequence[float]], float]
"""Statistic for messages of equal size: the median or the least."""
LEAST_NOISE = 0.02
"""Share by which a ratio of two times may be off, however little its rounds differ."""
UNEQUAL = 2.0
"""Latencies of two directions that differ by a larger factor are not averaged."""


@dataclass(frozen=True)
class OneWay:
    """Messages from one device to another on an otherwise idle network.

    Attributes:
        source, target: names of the devices.
        latency_s: half the time of the shortest message and its answer.
        bandwidth_gb_per_s: bandwidth of longer messages, decimal.
        latency_spread, bandwidth_spread: half the interquartile range of all samples as a fraction
            of the median; of bandwidth among the longest messages.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_gb_per_s: float
    latency_spread: float
    bandwidth_spread: float


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
    return OneWay(
        source,
        target,
        latency_s=answered_s / 2,
        bandwidth_gb_per_s=1e-9 / slope,
        latency_spread=spread(samples[least]),
        bandwidth_spread=spread([max(s - answered_s, slope) for s in samples[most]]),
    )


def spread(values: Sequence[float]) -> float:
    """Return half the interquartile range as a fraction of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0


@dataclass(frozen=True)
class BothWays:
    """Two devices: latency and bandwidth of a link between them.

    Attributes:
        latency_s: mean of both directions, or the lower one if the other is more than
            :data:`UNEQUAL` times as long: then it was something else that took so long.
        bandwidth_gb_per_s: from the mean time per byte, since a plan sends activations in one
            direction and their gradients in the other.
        spread: spread of the bandwidth, the larger of both directions.
        asymmetry: how much faster one direction is than the other, as a fraction.
        latency_ratio: how many times as long the one latency is as the other.
    """

    latency_s: float
    bandwidth_gb_per_s: float
    spread: float
    asymmetry: float
    latency_ratio: float = 1.0

    @classmethod
    def of(cls, ways: Sequence[OneWay]) -> BothWays:
        """Combine the measured directions of a pair: one or both."""
        widths = [way.bandwidth_gb_per_s for way in ways]
        latencies_s = [way.latency_s for way in ways]
        ratio = max(latencies_s) / max(min(latencies_s), 1e-9)
        return cls(
            latency_s=min(latencies_s) if ratio > UNEQUAL else fmean(latencies_s),
            bandwidth_gb_per_s=harmonic_mean(widths),
            spread=max(way.bandwidth_spread for way in ways),
            asymmetry=max(widths) / min(widths) - 1,
            latency_ratio=ratio,
        )


@dataclass(frozen=True)
class MeasuredRank:
    """A device that takes part: its name in the cluster file, its machine, its device type."""

    name: str
    host: str
    type: str


@dataclass(frozen=True)
class ConcurrentMessages:
    """Messages that were sent at the same time, round after round.

    A device begins the next round when all its messages of this one are done.

    Attributes:
        kind: purpose of the test, such as ``both ways``.
        flows: source and target of each message.
        bytes_: bytes of each message, chosen so that each takes about the same time alone.
        seconds: seconds per round at each target.
    """

    kind: str
    flows: tuple[Ends, ...]
    bytes_: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rates_gb_per_s(self) -> tuple[float, ...]:
        """Rate of each flow, decimal."""
        return tuple(b / s * 1e-9 for b, s in zip(self.bytes_, self.seconds, strict=True))


@dataclass(frozen=True)
class TimedReduction:
    """An all-reduce among devices, in their order: its bytes and seconds (median)."""

    devices: tuple[str, ...]
    bytes_: int
    seconds: float


@dataclass(frozen=True)
class Slowed:
    """How many times as long something takes beside something else.

    Attributes:
        measured: median over rounds, each compared with its time alone just before.
        spread: half of the interquartile range of the rounds.
    """

    measured: float
    spread: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Slowed:
        """Return the figure of some rounds, two at least."""
        lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
        return cls(middle, (upper - lower) / 2)

    @property
    def factor(self) -> float | None:
        """The factor of the cluster file: 1 for any within the spread of it, None for less."""
        if abs(self.measured - 1) <= max(self.spread, LEAST_NOISE):
            return 1.0
        return significant(self.measured, 4) if self.measured > 1 else None

    def __str__(self) -> str:
        """Return the figure in words, and that it is ignored if it is below 1."""
        words = f"{self.measured:.3g} times as long (spread {self.spread:.0%})"
        if self.factor is None:
            words += (
                ", which is ignored, since neither makes the other faster: something else used "
                "the machine, measure again when nothing does"
            )
        return words


@dataclass(frozen=True)
class Beside:
    """How a device's computation and its messages slow each other at the same time."""

    computation: Slowed
    messages: Slowed

    def __str__(self) -> str:
        """Return both figures in words."""
        return (
            f"at the same time a block takes {self.computation} and messages take {self.messages}"
        )


@dataclass(frozen=True)
class Measurements:
    """All measurements; pairs may be missing.

    Attributes:
        members: all devices, in the order of ranks.
        types: device types by name.
        ways: single messages, by source and target.
        together: messages sent at the same time.
        reductions: all-reduces.
        slowdowns: by host, how many times as long computation takes while one, two, … all of its
            ranks compute; of hosts where that was measured.
        beside: by device type, how messages and computation slow each other, where that was
            measured; ``types`` have the factors.
    """

    members: tuple[MeasuredRank, ...]
    types: Mapping[str, DeviceType]
    ways: Mapping[Ends, OneWay]
    together: tuple[ConcurrentMessages, ...] = ()
    reductions: tuple[TimedReduction, ...] = ()
    slowdowns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    beside: Mapping[str, Beside] = field(default_factory=dict)

    @cached_property
    def devices_of_hosts(self) -> dict[str, tuple[str, ...]]:
        """Names of the devices of each host."""
        found = defaultdict[str, list[str]](list)
        for member in self.members:
            found[member.host].append(member.name)
        return {host: tuple(names) for host, names in found.items()}

    @cached_property
    def hosts(self) -> dict[str, Host]:
        """Hosts whose ranks slow each other, by name."""
        found = {
            name: Host(devices=self.devices_of_hosts[name], slowdown=slowdown)
            for name, slowdown in self.slowdowns.items()
        }
        return {name: host for name, host in found.items() if host.is_slowed}

    @cached_property
    def pairs(self) -> dict[Ends, BothWays]:
        """Measured pairs of devices, in the order of ranks."""
        found = {}
        for a, b in self._all_pairs():
            if ways := [self.ways[ends] for ends in ((a, b), (b, a)) if ends in self.ways]:
                found[a, b] = BothWays.of(ways)
        return found

    @cached_property
    def missing(self) -> tuple[Ends, ...]:
        """Pairs of devices without a measurement, in the order of ranks."""
        return tuple(ends for ends in self._all_pairs() if ends not in self.pairs)

    def _all_pairs(self) -> Iterator[Ends]:
        return combinations([member.name for member in self.members], 2)
