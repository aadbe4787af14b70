"""What goes on at a share of its full rate: slowed computation, bytes that are slowed or share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from planner.cluster.cluster import Cluster

DIGITS = 12
"""Significant digits of a moment at which something ends that has had a share of its rate."""


@dataclass(eq=False, kw_only=True)
class Progress:
    """How far something is that takes some seconds at its full rate.

    Attributes:
        seconds: that it takes at its full rate.
        start_s: when it began.
        due_s: when it would end if it had all its rate from now on.
        share: of its rate that it has.
        since_s: since when it has had this share.
        end_s: when it ends if nothing changes.
    """

    seconds: float
    start_s: float = inf
    due_s: float = inf
    share: float = 1.0
    since_s: float = 0.0
    end_s: float = inf

    def begin(self, now: float) -> None:
        """Begin at the full rate."""
        self.start_s = now
        self.due_s = self.end_s = now + self.seconds

    def take(self, share: float, now: float) -> None:
        """Go on with a share of the rate."""
        self.due_s += (now - self.since_s) * (1 - self.share)
        self.since_s, self.share = now, share
        self.end_s = self.moment(0.0, now)

    def moment(self, left_s: float, now: float) -> float:
        """Return when all but so many of its seconds are done, if nothing changes; at least now."""
        due_s = self.due_s - left_s
        if self.due_s == self.start_s + self.seconds and self.share == 1:
            return max(now, due_s)
        # Rounded, so that what ends at one moment but for rounding errors does so here.
        at_s = self.since_s + (due_s - self.since_s) / self.share
        return max(now, float(f"{at_s:.{DIGITS}g}"))


class ComputeLoad:
    """What devices compute that something slows, or that slows their own communication.

    While k devices of a host compute, each takes the host's ``slowdown[k - 1]`` times as long as
    alone, and one that also sends, receives or reduces its type's
    ``compute_slowdown_while_communicating`` times as long again. What it sends, receives or reduces
    then takes ``communication_slowdown_while_computing`` times as long itself.

    Attributes:
        devices: those that may be slowed, or slow their messages.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._host_of = cluster.host_of
        self._factors = cluster.slowed_by_communication
        self._message_factors = cluster.slows_communication
        self.devices = frozenset((*self._host_of, *self._factors, *self._message_factors))
        self._running: dict[str, Progress] = {}
        self._under_way = Counter[str]()
        self._changed = False

    def start(self, device: str, seconds: float, now: float) -> None:
        """Begin a computation that takes so many seconds alone."""
        self._running[device] = progress = Progress(seconds=seconds)
        progress.begin(now)
        self._changed = True

    def stop(self, device: str) -> None:
        """End a device's computation."""
        del self._running[device]
        self._changed = True

    def communicate(self, devices: Collection[str], change: int) -> None:
        """Note that something among devices has set off (1) or has arrived (-1)."""
        for device in devices if self._factors else ():
            if device in self._factors:
                self._under_way[device] += change
                self._changed = True

    def may_slow(self, devices: Collection[str]) -> bool:
        """Return whether something among devices may be slowed by what they compute."""
        return bool(self._message_factors) and not self._message_factors.keys().isdisjoint(devices)

    def most_of_rate(self, devices: Collection[str]) -> float:
        """Return the share of its rate that something among devices has at most at present."""
        busy = (name for name in devices if name in self._running)
        return 1 / max((self._message_factors.get(name, 1.0) for name in busy), default=1.0)

    def settle(self, now: float) -> Iterator[tuple[str, Progress]]:
        """Give all their rates once what begins or ends at a moment has done so; yield the rest."""
        if not self._changed:
            return
        self._changed = False
        hosts = (self._host_of[name] for name in self._running if name in self._host_of)
        at_work = Counter(map(id, hosts))
        for device, progress in self._running.items():
            share = 1 / (self._by_host(device, at_work) * self._by_communication(device))
            if share != progress.share:
                progress.take(share, now)
            yield device, progress

    def _by_host(self, device: str, at_work: Mapping[int, int]) -> float:
        host = self._host_of.get(device)
        return 1.0 if host is None else host.slowdown[at_work[id(host)] - 1]

    def _by_communication(self, device: str) -> float:
        return self._factors[device] if self._under_way[device] else 1.0


def computed_together(
    cluster: Cluster, begins_s: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return when one computation of each device ends, while none communicates.

    Args:
        cluster: of the devices.
        begins_s: when each device begins.
        seconds: that each takes alone.
    """
    load = ComputeLoad(cluster)
    ends_s = {device: begin_s + seconds[device] for device, begin_s in begins_s.items()}
    waiting = sorted((begins_s[device], device) for device in begins_s if device in load.devices)
    running: dict[str, float] = {}
    while waiting or running:
        first = min(running, key=lambda device: (running[device], device), default="")
        if waiting and (not first or waiting[0][0] < running[first]):
            now, device = waiting.pop(0)
            load.start(device, seconds[device], now)
        else:
            now = ends_s[first] = running.pop(first)
            load.stop(first)
        running.update((device, progress.end_s) for device, progress in load.settle(now))
    return ends_s
