"""Devices of a host that slow each other, by the clock of docs/cost_model.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from planner.plan.plan import Plan


class CheckedHostClock:
    """A host's clock, which runs slower the more of its devices compute."""

    def __init__(self, slowdown: Sequence[float]) -> None:
        self._slowdown = slowdown
        self._clock = self._moment = 0.0
        self._rings_at: dict[str, float] = {}

    def begin(self, device: str, seconds: float, now: float) -> None:
        """Let a device compute what takes so many seconds alone."""
        self._tick(now)
        self._rings_at[device] = self._clock + seconds

    def done(self, device: str, now: float) -> None:
        """Note that a device computes no longer."""
        self._tick(now)
        del self._rings_at[device]

    def moments(self) -> Iterator[tuple[str, float]]:
        """Yield when each device that computes will be done, if none begins or ends before."""
        for device in self._rings_at:
            yield device, self.moment(device, 0.0)

    def moment(self, device: str, behind_s: float) -> float:
        """Return when a device that computes will have all but so many seconds behind it."""
        left_s = self._rings_at[device] - self._clock
        return self._moment + (left_s - behind_s) * self._slower()

    def _slower(self) -> float:
        return self._slowdown[len(self._rings_at) - 1] if self._rings_at else 1.0

    def _tick(self, now: float) -> None:
        if now > self._moment:
            self._clock += (now - self._moment) / self._slower()
            self._moment = now


def host_clocks(plan: Plan) -> dict[str, CheckedHostClock]:
    """Return the clocks of devices that are on a host, by device."""
    found: dict[str, CheckedHostClock] = {}
    for host in plan.cluster.hosts:
        found.update(dict.fromkeys(host.devices, CheckedHostClock(host.slowdown)))
    return found


def ends_together(
    begins_s: Mapping[str, float],
    seconds: Mapping[str, float],
    clocks: Mapping[str, CheckedHostClock],
) -> dict[str, float]:
    """Return when each device on a host has done what takes it so many seconds alone."""
    found, computing = dict[str, float](), dict[str, float]()
    begins = sorted((begin, device) for device, begin in begins_s.items() if device in clocks)
    while begins or computing:
        moment, device = min(((end, name) for name, end in computing.items()), default=(inf, ""))
        if begins and begins[0][0] < moment:
            moment, device = begins.pop(0)
            clocks[device].begin(device, seconds[device], moment)
        else:
            found[device] = computing.pop(device)
            clocks[device].done(device, moment)
        computing.update(clocks[device].moments())
    return found
