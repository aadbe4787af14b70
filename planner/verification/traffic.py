"""Messages and reductions that are on their way at once, by docs/cost_model.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from planner.cluster.cluster import Cluster
from planner.verification.routes import Lane

_ROUNDING = 1e-9


@dataclass(eq=False)
class CheckedSending:
    """Something that is sent.

    Attributes:
        lines: in which it waits: in each, one is on its way at a time.
        devices: that send or receive meanwhile.
        seconds: that it takes alone.
        latency_s: of these, without bytes.
        bytes_per_s: that it moves at most.
        crossings: of lanes that it shares, and how often it crosses each.
        start_s: when it sets off.
        alone_s: when it would arrive if from now on it had no company.
        speed: share of its bytes a second that it moves, since ``since_s``.
        arrives_s: when it arrives if nothing changes.
        most: share of ``bytes_per_s`` that it may have while devices that slow it compute.
    """

    lines: tuple[Hashable, ...]
    devices: tuple[str, ...]
    seconds: float
    latency_s: float = 0.0
    bytes_per_s: float = inf
    crossings: Mapping[Lane, int] | None = None
    start_s: float = inf
    alone_s: float = inf
    speed: float = 1.0
    since_s: float = 0.0
    arrives_s: float = inf
    most: float = 1.0

    @property
    def flows_from_s(self) -> float:
        """When its first byte moves."""
        return self.start_s + self.latency_s


class Traffic:
    """All that waits or moves.

    Args:
        cluster: on whose links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.links
        types = ((row.name, cluster.device_types[row.type]) for row in cluster.devices)
        self._slowness = {n: kind.communication_slowdown_while_computing for n, kind in types}
        self._waiting: list[CheckedSending] = []
        self._moving: list[CheckedSending] = []

    def enter(self, sending: CheckedSending, now: float) -> None:
        """Take up what is to be sent; it sets off as soon as it is first in all its lines."""
        self._waiting.append(sending)
        self._depart(now)

    def communicating(self) -> set[str]:
        """Return the devices that send or receive something that is on its way."""
        return {device for row in self._moving for device in row.devices}

    def next_s(self, now: float) -> float:
        """Return the next moment, not before one, at which something arrives or begins to flow."""
        flows = (row.flows_from_s for row in self._moving)
        arrivals = (row.arrives_s for row in self._moving)
        return min([*arrivals, *(moment for moment in flows if moment > now)], default=inf)

    def arrived(self, now: float) -> list[CheckedSending]:
        """Remove and return what arrives at a moment, and let others set off."""
        found = [row for row in self._moving if row.arrives_s == now]
        self._moving = [row for row in self._moving if row.arrives_s != now]
        if found:
            self._depart(now)
        return found

    def _depart(self, now: float) -> None:
        taken = {line for row in self._moving for line in row.lines}
        waiting = []
        for sending in self._waiting:
            if taken.isdisjoint(sending.lines):
                sending.start_s = now
                sending.alone_s = sending.arrives_s = now + sending.seconds
                self._moving.append(sending)
            else:
                waiting.append(sending)
            taken.update(sending.lines)
        self._waiting = waiting

    def divide(self, now: float, computing: Collection[str] = ()) -> None:
        """Give everything its speed from a moment on, at which some devices compute."""
        flowing = [row for row in self._moving if row.flows_from_s <= now]
        for sending in flowing:
            slowness = (self._slowness[name] for name in sending.devices if name in computing)
            sending.most = 1 / max(slowness, default=1.0)
        for sending, share in zip(flowing, self._shares(flowing), strict=True):
            speed = share * sending.most
            if abs(speed - sending.speed) > _ROUNDING * speed:
                sending.alone_s += (now - sending.since_s) * (1 - sending.speed)
                sending.since_s, sending.speed = now, speed
                left_s = (sending.alone_s - now) / speed
                # 12 significant digits: sums of many terms may be off behind these.
                sending.arrives_s = max(now, float(f"{now + left_s:.11e}"))

    def _shares(self, flowing: list[CheckedSending]) -> Iterator[float]:
        """Yield the share of what it may have that each gets of its lanes; without any, all."""
        meeting = [row for row in flowing if row.crossings]
        rates = iter(self._filled(meeting))
        for row in flowing:
            share = next(rates) / (row.bytes_per_s * row.most) if row.crossings else 1.0
            yield 1.0 if share >= 1 - _ROUNDING else share

    def _filled(self, flowing: list[CheckedSending]) -> Iterator[float]:
        """Progressive filling: all rates rise together; those over a full lane rise no more."""
        rates, most = [0.0] * len(flowing), [row.bytes_per_s * row.most for row in flowing]
        growing = set(range(len(flowing)))
        room = {lane: self._width(lane) for row in flowing for lane in row.crossings or ()}
        while growing:
            crossing = Counter[Lane]()
            for number in growing:
                crossing.update(flowing[number].crossings or {})
            rise = min(most[number] - rates[number] for number in growing)
            rise = min([rise, *(room[lane] / count for lane, count in crossing.items())])
            for number in growing:
                rates[number] += rise
            for lane, count in crossing.items():
                room[lane] -= rise * count
            full = {lane for lane in crossing if room[lane] <= _ROUNDING * self._width(lane)}
            growing = {
                number
                for number in growing
                if rates[number] < most[number] * (1 - _ROUNDING)
                and full.isdisjoint(flowing[number].crossings or {})
            }
        yield from rates

    def _width(self, lane: Lane) -> float:
        return self._links[lane[0]].bandwidth_gb_per_s * 1e9
