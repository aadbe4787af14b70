"""Computation on hosts whose devices slow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import Host


class HostLoad:
    """What the devices of a host compute, and when each will be done.

    While k of them compute, all take ``slowdown[k - 1]`` times as long as alone. The host's own
    time therefore runs at the inverse of that: a computation ends when as much of it has passed as
    the computation takes alone (the virtual time of processor sharing).
    """

    def __init__(self, host: Host) -> None:
        self._slowdown = host.slowdown
        self._due: dict[str, float] = {}
        self._passed = 0.0
        self._since_s = 0.0

    @property
    def _factor(self) -> float:
        return self._slowdown[len(self._due) - 1] if self._due else 1.0

    def start(self, device: str, seconds: float, now: float) -> None:
        """Begin a computation that takes so many seconds alone."""
        self._advance(now)
        self._due[device] = self._passed + seconds

    def stop(self, device: str, now: float) -> None:
        """End a device's computation."""
        self._advance(now)
        del self._due[device]

    @property
    def ends_s(self) -> Iterator[tuple[str, float]]:
        """Devices that compute, each with the time at which it ends if nothing else changes."""
        for device in self._due:
            yield device, self.end_s(device)

    def end_s(self, device: str, behind_s: float = 0.0) -> float:
        """Return when a device ends what it computes, but for some seconds, if nothing changes."""
        return self._since_s + (self._due[device] - behind_s - self._passed) * self._factor

    def _advance(self, now: float) -> None:
        if now > self._since_s:
            self._passed += (now - self._since_s) / self._factor
            self._since_s = now


def host_loads(cluster: Cluster) -> dict[str, HostLoad]:
    """Return the load of each device's host, for devices that others slow; nothing runs yet."""
    loads = {host: HostLoad(host) for host in dict.fromkeys(cluster.host_of.values())}
    return {device: loads[host] for device, host in cluster.host_of.items()}


def computed_together(
    loads: Mapping[str, HostLoad], begins_s: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return when one computation of each device ends.

    Args:
        loads: of the hosts of some devices, on which nothing runs.
        begins_s: when each device begins.
        seconds: that each takes alone.
    """
    ends_s = {device: begin_s + seconds[device] for device, begin_s in begins_s.items()}
    waiting = sorted((begins_s[d], d) for d in begins_s if d in loads)
    running: dict[str, float] = {}
    while waiting or running:
        first = min(running, key=lambda device: (running[device], device), default="")
        if waiting and (not first or waiting[0][0] < running[first]):
            begin_s, device = waiting.pop(0)
            loads[device].start(device, seconds[device], begin_s)
        else:
            device = first
            ends_s[device] = running.pop(device)
            loads[device].stop(device, ends_s[device])
        running.update(loads[device].ends_s)
    return ends_s
