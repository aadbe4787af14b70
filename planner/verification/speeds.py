"""How fast devices compute beside others of their host and while they communicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from planner.plan.plan import Plan


@dataclass
class _Running:
    """What a device computes: seconds alone that were left at a moment, and its slowness since."""

    left_s: float
    moment: float
    slower: float = 1.0
    was_slowed: bool = False

    def at(self, behind_s: float) -> float:
        """When all but so many of its seconds are done if its slowness stays as it is."""
        found = self.moment + (self.left_s - behind_s) * self.slower
        # 12 significant digits, as for messages that share links.
        return float(f"{found:.11e}") if self.was_slowed else found


class CheckedSpeeds:
    """The devices of a plan that may be slowed, and what they compute, by docs/cost_model.md."""

    def __init__(self, plan: Plan) -> None:
        cluster = plan.cluster
        self._hosts = {name: host for host in cluster.hosts for name in host.devices}
        types = {device.name: cluster.device_types[device.type] for device in cluster.devices}
        self._factors = {n: kind.compute_slowdown_while_communicating for n, kind in types.items()}
        self._slowing = {
            n for n, kind in types.items() if kind.communication_slowdown_while_computing != 1
        }
        self._running: dict[str, _Running] = {}

    def may_slow(self, device: str) -> bool:
        """Return whether a device has a host, or a factor other than 1 either way."""
        return device in self._hosts or self._factors[device] != 1 or device in self._slowing

    @property
    def computing(self) -> Collection[str]:
        """The devices of these that compute."""
        return self._running

    def begin(self, device: str, seconds: float, now: float) -> None:
        """Let a device compute what takes so many seconds alone."""
        self._running[device] = _Running(seconds, now)

    def done(self, device: str) -> None:
        """Note that a device computes no longer."""
        del self._running[device]

    def moments(self, now: float, communicating: Collection[str]) -> dict[str, float]:
        """Return when each will be done if nothing begins or ends after what has by now."""
        busy = Counter(
            self._hosts[name].devices[0] for name in self._running if name in self._hosts
        )
        for name, row in self._running.items():
            slower = self._factors[name] if name in communicating else 1.0
            if name in self._hosts:
                host = self._hosts[name]
                slower *= host.slowdown[busy[host.devices[0]] - 1]
            if slower != row.slower:
                row.left_s -= (now - row.moment) / row.slower
                row.moment, row.slower, row.was_slowed = now, slower, True
        return {name: max(now, row.at(0.0)) for name, row in self._running.items()}

    def moment(self, device: str, behind_s: float) -> float:
        """Return when a device that computes will have all but so many seconds behind it."""
        return self._running[device].at(behind_s)


def ends_together(
    plan: Plan, begins_s: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return when each device that may be slowed has done a computation; none communicates."""
    found, speeds = dict[str, float](), CheckedSpeeds(plan)
    computing = dict[str, float]()
    begins = sorted((at, device) for device, at in begins_s.items() if speeds.may_slow(device))
    while begins or computing:
        moment, device = min(((end, name) for name, end in computing.items()), default=(inf, ""))
        if begins and begins[0][0] < moment:
            moment, device = begins.pop(0)
            speeds.begin(device, seconds[device], moment)
        else:
            found[device] = computing.pop(device)
            speeds.done(device)
        computing.update(speeds.moments(moment, ()))
    return found
