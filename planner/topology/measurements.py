"""Raw measurements of a cluster: messages, concurrent messages and all-reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from planner.cluster.cluster_file import Host
from planner.cluster.hardware import DeviceType
from planner.topology.message_fit import OneWay
from planner.units import significant

Ends = tuple[str, str]
LEAST_NOISE = 0.02
"""Share by which a ratio of two times may be off, however little its rounds differ."""
UNEQUAL = 2.0
"""Latencies of two directions that differ by a larger factor are not averaged."""


@dataclass(frozen=True)
class MeasuredRank:
    """A device that takes part.

    Attributes:
        name: name of the device in the cluster file.
        host: its machine.
        type: name of its device type.
    """

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
        measured: median over rounds, each compared with what it takes alone just before.
        spread: half of the range of the middle half of the rounds.
    """

    measured: float
    spread: float

    @property
    def factor(self) -> float | None:
        """The factor of the cluster file: 1 for any within the spread of it, None for less."""
        if abs(self.measured - 1) <= max(self.spread, LEAST_NOISE):
            return 1.0
        return significant(self.measured, 4) if self.measured > 1 else None

    def __str__(self) -> str:
        """Return the figure in words, with what it is not taken for."""
        words = f"{self.measured:.3g} times as long (spread {self.spread:.0%})"
        if self.factor is None:
            words += (
                ", which is not taken, since neither makes the other faster: something else used "
                "the machine, measure again when nothing does"
            )
        return words


@dataclass(frozen=True)
class Beside:
    """What a device's computation and its messages take longer at the same time than alone."""

    computation: Slowed
    messages: Slowed

    def __str__(self) -> str:
        """Return both figures in words."""
        return (
            f"at the same time a block takes {self.computation} and messages take {self.messages}"
        )


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
    def hosts(self) -> dict[str, Host]:
        """Hosts whose ranks slow each other, by name."""
        members: dict[str, list[str]] = {}
        for member in self.members:
            members.setdefault(member.host, []).append(member.name)
        found = {
            name: Host(devices=tuple(members[name]), slowdown=slowdown)
            for name, slowdown in self.slowdowns.items()
        }
        return {name: host for name, host in found.items() if host.is_slowed}

    @cached_property
    def pairs(self) -> dict[Ends, BothWays]:
        """Measured pairs of devices, in the order of ranks."""
        names = [member.name for member in self.members]
        found = {}
        for number, first in enumerate(names):
            for second in names[number + 1 :]:
                ends = (first, second), (second, first)
                ways = [self.ways[pair] for pair in ends if pair in self.ways]
                if ways:
                    found[first, second] = _both_ways(ways)
        return found

    @cached_property
    def missing(self) -> tuple[Ends, ...]:
        """Pairs of devices without a measurement, in the order of ranks."""
        names = [member.name for member in self.members]
        return tuple(
            (first, second)
            for number, first in enumerate(names)
            for second in names[number + 1 :]
            if (first, second) not in self.pairs
        )


def _both_ways(ways: Sequence[OneWay]) -> BothWays:
    widths = [way.bandwidth_gb_per_s for way in ways]
    latencies_s = [way.latency_s for way in ways]
    ratio = max(latencies_s) / max(min(latencies_s), 1e-9)
    return BothWays(
        min(latencies_s) if ratio > UNEQUAL else sum(latencies_s) / len(ways),
        len(widths) / sum(1 / width for width in widths),
        max(way.bandwidth_spread for way in ways),
        max(widths) / min(widths) - 1,
        ratio,
    )
