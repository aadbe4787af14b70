"""Messages and reductions on their way: what they wait for, and how they share links.

Whatever is sent first waits in line for all that serves one at a time: the links of its way where
the plan's rules say ``in_turn``; else its pair of devices, a device with one stream, or the
devices that reduce. Where links are shared fairly, its bytes then have max-min fair rates
(Bertsekas and Gallager, Data Networks, 6.5.2): the rates of all rise together until a link is full,
then those over other links continue to rise. While a device that it concerns computes, its rate is
at most a share of what it has alone, where the device's type says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.plan.operations import Operation
from planner.simulation.progress import ComputeLoad, Progress

_ROUNDING = 1e-9
"""Share of a rate or a bandwidth by which rounding may be off."""

Link = tuple[int, int]
Key = Operation | int
"""A message by the operation that needs it, a reduction by its number."""
Demand = tuple[tuple[Link, ...], float]
"""The links of a flow and the rate that it has at most."""
LimitedDemand = tuple[tuple[Link, ...], float, tuple[float, ...]]
"""A demand, with the capacity of each of its links."""
Share = tuple[float, Link | None]
"""The share of that rate that a flow gets, and the link that gives it less than all."""


def fair_rates(
    flows: Sequence[Demand],
    capacity: Mapping[Link, float],
    alike: Sequence[int] | None = None,
) -> list[float]:
    """Return the max-min fair rate of each flow.

    Args:
        flows: the links of each flow and its maximum rate, which it gets without links. A flow
            takes its rate of a link as often as it names it.
        capacity: capacity of each link, in the same unit.
        alike: how many flows each of them stands for; None: one each.
    """
    rates = [0.0] * len(flows)
    used = dict.fromkeys(capacity, 0.0)
    rising = list(range(len(flows)))
    times = [1] * len(flows) if alike is None else alike
    while rising:
        users: Counter[Link] = Counter()
        for index in rising:
            for link in flows[index][0]:
                users[link] += times[index]
        room = {link: (capacity[link] - used[link]) / count for link, count in users.items()}
        level = min([*room.values(), *(flows[index][1] for index in rising)])
        most = level * (1 + _ROUNDING)
        full = {link for link, rate in room.items() if rate <= most}
        left = []
        for index in rising:
            links, highest = flows[index]
            if highest > most and full.isdisjoint(links):
                left.append(index)
                continue
            rates[index] = min(level, highest)
            for link in links:
                used[link] += rates[index] * times[index]
        rising = left
    return rates


def limiting_links(ways: Iterable[Way], width: Callable[[Link], float]) -> frozenset[Link]:
    """Return the links that can give a flow less than its rate.

    Of links that all the same ways cross equally often, only the narrowest ever does. One that a
    single way crosses never does, since flows of one way follow each other.

    Args:
        ways: of all flows.
        width: capacity of a link.
    """
    users: defaultdict[Link, list[tuple[int, int]]] = defaultdict(list)
    for number, way in enumerate(dict.fromkeys(ways)):
        for link, times in Counter(way.links).items():
            users[link].append((number, times))
    narrowest: dict[tuple[tuple[int, int], ...], Link] = {}
    for link, crossed in users.items():
        of = tuple(crossed)
        if len(of) > 1 and (of not in narrowest or width(link) < width(narrowest[of])):
            narrowest[of] = link
    return frozenset(narrowest.values())


def _divide(demands: tuple[LimitedDemand, ...]) -> Sequence[Share]:
    """Return the share of each flow."""
    capacity = {
        link: c for links, _, found in demands for link, c in zip(links, found, strict=True)
    }
    rates = fair_rates([(links, gb_per_s) for links, gb_per_s, _ in demands], capacity)
    left = dict(capacity)
    for (links, _, _), rate in zip(demands, rates, strict=True):
        for link in links:
            left[link] -= rate
    shares: list[Share] = []
    for (links, gb_per_s, _), rate in zip(demands, rates, strict=True):
        share = rate / gb_per_s
        if share >= 1 - _ROUNDING:
            shares.append((1.0, None))
        else:
            shares.append((share, min(links, key=lambda link: left[link] / capacity[link])))
    return shares


_remembered_shares = lru_cache(maxsize=2**16)(_divide)
"""The same flows meet from one microbatch to the next, and in most plans that a search compares."""


class Way(NamedTuple):
    """Links of flows between the same devices, of which one at a time is on its way."""

    devices: tuple[str, ...]
    links: tuple[Link, ...]


@dataclass(eq=False, kw_only=True)
class Flow(Progress):
    """A message or a reduction.

    Attributes:
        key: that says which.
        waits_for: what serves one at a time, in the order of requests.
        latency_s: of its seconds, before its first byte.
        gb_per_s: of its bytes, alone.
        links: that its bytes share with others; several times where it crosses one several times.
        devices: that communicate meanwhile.
        demand: what it asks of its links.
        slowed_by: the link that gave it less than all its rate, the last time that one did.
        most: share of its rate that it has at most, by what its devices compute.
        meets_others: whether it shares links, or has shared them.
    """

    key: Key
    waits_for: Sequence[object]
    latency_s: float
    gb_per_s: float
    links: tuple[Link, ...]
    devices: Collection[str]
    demand: LimitedDemand = ((), inf, ())
    slowed_by: Link | None = None
    most: float = 1.0
    meets_others: bool = False

    @property
    def first_s(self) -> float:
        """When its first byte sets off."""
        return self.start_s + self.latency_s


class Network:
    """All that is on its way.

    Args:
        cluster: whose links.
        announce: told the key of a flow and a moment at which to call :meth:`hear`, or again
            another: an earlier announcement may no longer be right.
        load: told which devices communicate, and asked which compute.
    """

    def __init__(
        self, cluster: Cluster, announce: Callable[[Key, float], None], load: ComputeLoad
    ) -> None:
        self._links = cluster.links
        self._announce = announce
        self._load = load
        self._flows: dict[Key, Flow] = {}
        self._lines: defaultdict[object, deque[Flow]] = defaultdict(deque)
        self._on: defaultdict[Link, dict[Key, Flow]] = defaultdict(dict)
        self._changed: dict[Link, None] = {}
        # Flows under way that what their devices compute may slow.
        self._slowed: dict[Key, Flow] = {}
        self._capacities: dict[tuple[Link, ...], tuple[float, ...]] = {}

    def request(self, flow: Flow, now: float) -> None:
        """Let a flow set off, or wait until it is first in all its lines."""
        self._flows[flow.key] = flow
        flow.demand = self._demand(flow)
        for resource in flow.waits_for:
            self._lines[resource].append(flow)
        self._start_first(flow, now)

    def hear(self, key: Key, now: float) -> Flow | None:
        """Return a flow if it ends at a moment that was announced for it."""
        flow = self._flows.get(key)
        if flow is None:
            return None
        if flow.end_s != now:
            if flow.first_s == now:
                self._changed.update(dict.fromkeys(flow.links))
            return None
        del self._flows[key]
        self._slowed.pop(key, None)
        self._load.communicate(flow.devices, -1)
        for link in dict.fromkeys(flow.links):
            del self._on[link][key]
            if self._on[link]:
                self._changed[link] = None
        for resource in flow.waits_for:
            self._lines[resource].popleft()
        for resource in flow.waits_for:
            if self._lines[resource]:
                self._start_first(self._lines[resource][0], now)
        return flow

    def settle(self, now: float) -> None:
        """Divide the links anew, once all that begins or ends at a moment has done so."""
        for flow in self._slowed.values():
            self._slow(flow, now)
        if not self._changed:
            return
        flows = [flow for flow in self._reached(self._changed) if flow.first_s <= now]
        self._changed.clear()
        shares = _remembered_shares(tuple([flow.demand for flow in flows]))
        for flow, (share, slowed_by) in zip(flows, shares, strict=True):
            if slowed_by is not None:
                flow.slowed_by = slowed_by
            self._give(flow, share * flow.most, now)

    def _slow(self, flow: Flow, now: float) -> None:
        """Note by how much a flow is slowed from now on, once its first byte has set off."""
        if flow.first_s > now:
            return
        most = self._load.most_of_rate(flow.devices)
        if most == flow.most:
            return
        flow.most = most
        flow.demand = self._demand(flow)
        if flow.links:
            self._changed.update(dict.fromkeys(flow.links))
        else:
            self._give(flow, most, now)

    def _give(self, flow: Flow, share: float, now: float) -> None:
        if share != flow.share:
            flow.take(share, now)
            self._announce(flow.key, flow.end_s)

    def _demand(self, flow: Flow) -> LimitedDemand:
        return flow.links, flow.gb_per_s * flow.most, self._capacity(flow.links)

    def _capacity(self, links: tuple[Link, ...]) -> tuple[float, ...]:
        if links not in self._capacities:
            found = [self._links[number].bandwidth_gb_per_s for number, _ in links]
            self._capacities[links] = tuple(found)
        return self._capacities[links]

    def _start_first(self, flow: Flow, now: float) -> None:
        if flow.start_s < inf or any(
            self._lines[resource][0] is not flow for resource in flow.waits_for
        ):
            return
        flow.begin(now)
        self._load.communicate(flow.devices, 1)
        self._announce(flow.key, flow.end_s)
        if self._load.may_slow(flow.devices):
            self._slowed[flow.key] = flow
            if flow.first_s > now:
                self._announce(flow.key, flow.first_s)
        if not flow.links:
            return
        meets = any(self._on[link] for link in flow.links)
        for link in flow.links:
            self._on[link][flow.key] = flow
        if meets:
            self._meet(flow, now)

    def _meet(self, flow: Flow, now: float) -> None:
        """Announce the first bytes of flows that share links; those alone on theirs need none."""
        for other in self._reached(flow.links):
            if not other.meets_others and other.first_s > now:
                self._announce(other.key, other.first_s)
            other.meets_others = True
        if flow.first_s <= now:
            self._changed.update(dict.fromkeys(flow.links))

    def _reached(self, links: Iterable[Link]) -> list[Flow]:
        """Return flows over these links, flows that share a link with them, and so on."""
        found: dict[Key, Flow] = {}
        seen: set[Link] = set()
        left = list(links)
        while left:
            link = left.pop()
            if link in seen:
                continue
            seen.add(link)
            for key, flow in self._on[link].items():
                if key not in found:
                    found[key] = flow
                    left += flow.links
        return list(found.values())
