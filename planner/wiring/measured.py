"""What was measured of a cluster, before anything is concluded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.artifacts.hardware import DeviceType
from planner.wiring.message_fit import OneWay

Ends = tuple[str, str]


@dataclass(frozen=True)
class Member:
    """A device that takes part.

    Attributes:
        name: as the cluster file will have it.
        host: the machine it is in.
        type: name of its device type.
    """

    name: str
    host: str
    type: str


@dataclass(frozen=True)
class Together:
    """Messages that flowed at the same time, round after round.

    A device begins the next round when all its messages of this one are through.

    Attributes:
        kind: what it is to show, such as ``both ways``.
        flows: source and target of each.
        bytes_: of each message; worth about the same time on each way alone.
        seconds: from round to round at each target.
    """

    kind: str
    flows: tuple[Ends, ...]
    bytes_: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def rates_gb_per_s(self) -> tuple[float, ...]:
        """Of each, decimal."""
        return tuple(b / s * 1e-9 for b, s in zip(self.bytes_, self.seconds, strict=True))


@dataclass(frozen=True)
class Reduction:
    """An all-reduce among devices, in their order: its bytes and seconds (median)."""

    devices: tuple[str, ...]
    bytes_: int
    seconds: float


@dataclass(frozen=True)
class BothWays:
    """Two devices: latency and bandwidth of a link that would join them alone.

    Attributes:
        latency_s: mean of both ways.
        bandwidth_gb_per_s: of the mean time a byte, as a plan sends activations one way and their
            gradients the other.
        spread: of the bandwidth, the larger of both ways.
        asymmetry: how much faster the one way is than the other, as a share.
    """

    latency_s: float
    bandwidth_gb_per_s: float
    spread: float
    asymmetry: float


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured; pairs may be missing.

    Attributes:
        members: all devices, in the order of ranks.
        types: figures by the names of device types.
        ways: single messages, by source and target.
        together: messages at the same time.
        reductions: all-reduces.
    """

    members: tuple[Member, ...]
    types: Mapping[str, DeviceType]
    ways: Mapping[Ends, OneWay]
    together: tuple[Together, ...] = ()
    reductions: tuple[Reduction, ...] = ()

    @cached_property
    def pairs(self) -> dict[Ends, BothWays]:
        """By the two devices in the order of ranks; of those of which a way was measured."""
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
        """Pairs of devices neither way of which was measured, in the order of ranks."""
        names = [member.name for member in self.members]
        return tuple(
            (first, second)
            for number, first in enumerate(names)
            for second in names[number + 1 :]
            if (first, second) not in self.pairs
        )


def _both_ways(ways: Sequence[OneWay]) -> BothWays:
    widths = [way.bandwidth_gb_per_s for way in ways]
    return BothWays(
        sum(way.latency_s for way in ways) / len(ways),
        len(widths) / sum(1 / width for width in widths),
        max(way.bandwidth_spread for way in ways),
        max(widths) / min(widths) - 1,
    )
