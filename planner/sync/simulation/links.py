"""Transfers over the links of a cluster, which those that are under way share max-min fairly."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from planner.cluster.cluster import Cluster, node_of
from planner.errors import PipeplanError
from planner.simulation.network import Link, fair_rates

_ROUNDING_S = 1e-12
_MOST_KEPT = 10_000
"""Sets of routes whose rates are kept at a time."""


@dataclass(frozen=True)
class WorkerFlow:
    """A message, or a ring of messages that advance together.

    Attributes:
        links: the links that its bytes cross; a ring names a link as often as it crosses it.
        most_gb_per_s: bandwidth of its narrowest route.
        bytes: bytes over each crossing.
        fixed_s: latencies and overheads, before the bytes.
    """

    links: tuple[Link, ...]
    most_gb_per_s: float
    bytes: float
    fixed_s: float


@dataclass(frozen=True)
class WorkerLinks:
    """The routes between the workers' devices.

    Attributes:
        cluster: devices and links.
        devices: by pipeline rank, the device of each worker.
        within_factor, between_factor: measured bandwidths over the cluster file's, of routes within
            a node and of routes and links between nodes.
    """

    cluster: Cluster
    devices: tuple[tuple[str, ...], ...]
    within_factor: float = 1.0
    between_factor: float = 1.0

    def at_speed(self, within_factor: float, between_factor: float) -> WorkerLinks:
        """Return the links with bandwidths times these factors."""
        return replace(
            self,
            within_factor=within_factor * self.within_factor,
            between_factor=between_factor * self.between_factor,
        )

    def message(
        self, source: int, target: int, key: int, bytes_: float, fixed_s: float
    ) -> WorkerFlow:
        """Return the flow of a message between two workers' devices of a pipeline rank."""
        links, most = self._route(key, source, target)
        return WorkerFlow(links, most, bytes_, fixed_s)

    def ring(self, members: Sequence[int], key: int, bytes_: float, fixed_s: float) -> WorkerFlow:
        """Return the flow of a ring in which each member sends these bytes to the next one."""
        following = (*members[1:], members[0])
        routes = [self._route(key, *pair) for pair in zip(members, following, strict=True)]
        links = tuple(link for row, _ in routes for link in row)
        return WorkerFlow(links, min(most for _, most in routes), bytes_, fixed_s)

    @cached_property
    def capacity_gb_per_s(self) -> dict[Link, float]:
        """Bandwidths of the cluster's links, in each direction or in both together (0)."""
        return {
            (index, direction): link.bandwidth_gb_per_s * self._factor((index, direction))
            for index, link in enumerate(self.cluster.links)
            for direction in (-1, 0, 1)
        }

    def _factor(self, link: Link) -> float:
        return self.within_factor if link in self._within else self.between_factor

    def _route(self, key: int, source: int, target: int) -> tuple[tuple[Link, ...], float]:
        name = (key, source, target)
        if name not in self._routes:
            self._routes[name] = self._found_route(*name)
        return self._routes[name]

    @cached_property
    def _routes(self) -> dict[tuple[int, int, int], tuple[tuple[Link, ...], float]]:
        """Return the routes that have been found."""
        return {}

    def _found_route(self, key: int, source: int, target: int) -> tuple[tuple[Link, ...], float]:
        devices = self.devices[key]
        route = self.cluster.route(devices[source], devices[target])
        if route is None:
            raise PipeplanError(
                f"cluster: no links join {devices[source]!r} and {devices[target]!r}, which "
                "synchronise; add links, or simulate copies of the first pipeline with --workers"
            )
        is_within = node_of(devices[source]) == node_of(devices[target])
        factor = self.within_factor if is_within else self.between_factor
        return route.links, route.bandwidth_gb_per_s * factor

    @cached_property
    def _within(self) -> frozenset[Link]:
        """Links on a route within a node."""
        found: set[Link] = set()
        for row in self.devices:
            nodes: dict[str, list[str]] = defaultdict(list)
            for device in row:
                nodes[node_of(device)].append(device)
            for names in nodes.values():
                for source in names:
                    for target in names:
                        route = self.cluster.route(source, target)
                        found.update(route.links if route is not None else ())
        return frozenset(found)


@dataclass
class _Moving:
    """A flow under way.

    Attributes:
        flow: the flow.
        what: what the caller knows it by.
        gigabytes: remaining at the last change of its rate.
        since_s: time of this change.
        rate: GB/s since then.
        end_s: its end at this rate.
    """

    flow: WorkerFlow
    what: Any
    gigabytes: float
    since_s: float
    rate: float = 0.0
    end_s: float = math.inf


class WorkerTransfers:
    """Flows under way. Each that begins or ends changes the rates of those it shares links with.

    Args:
        capacity_gb_per_s: bandwidths of links.
    """

    def __init__(self, capacity_gb_per_s: Mapping[Link, float]) -> None:
        self._capacity = capacity_gb_per_s
        self._moving: dict[int, _Moving] = {}
        self._on: defaultdict[Link, set[int]] = defaultdict(set)
        self._ends: list[tuple[float, int]] = []
        self._numbers = count()
        self._known: dict[tuple[tuple[tuple[Link, ...], float], ...], list[float]] = {}

    def begin(self, now_s: float, flow: WorkerFlow, what: Any) -> None:
        """Start to move the bytes of a flow."""
        number = next(self._numbers)
        self._moving[number] = _Moving(flow, what, flow.bytes / 1e9, now_s)
        for link in flow.links:
            self._on[link].add(number)
        self._share(now_s, {number}, flow.links)

    @property
    def next_end_s(self) -> float:
        """The time of the next end, unless a flow begins before; infinite if nothing moves."""
        while self._ends:
            end_s, number = self._ends[0]
            moving = self._moving.get(number)
            if moving is not None and moving.end_s == end_s:
                return end_s
            heapq.heappop(self._ends)
        return math.inf

    def ended(self, now_s: float) -> list[Any]:
        """Remove the flows that have ended by now, and return what the caller knows them by."""
        found, changed = [], dict[Link, None]()
        while self.next_end_s <= now_s + _ROUNDING_S:
            number = heapq.heappop(self._ends)[1]
            moving = self._moving.pop(number)
            found.append(moving.what)
            for link in moving.flow.links:
                self._on[link].discard(number)
                changed[link] = None
        self._share(now_s, set(), changed)
        return found

    def _share(self, now_s: float, changed: set[int], links: Iterable[Link]) -> None:
        """Update the rates of all flows that a change on some links can affect."""
        numbers = sorted(changed | self._reached(links))
        rates = self._rates(tuple(self._moving[number].flow for number in numbers))
        for number, rate in zip(numbers, rates, strict=True):
            moving = self._moving[number]
            if rate != moving.rate:
                moving.gigabytes -= moving.rate * (now_s - moving.since_s)
                moving.since_s, moving.rate = now_s, rate
                moving.end_s = now_s + max(0.0, moving.gigabytes) / rate
                heapq.heappush(self._ends, (moving.end_s, number))

    def _rates(self, flows: tuple[WorkerFlow, ...]) -> list[float]:
        """Return the flows' rates, which recur as often as the same routes are in use."""
        name = tuple((flow.links, flow.most_gb_per_s) for flow in flows)
        if name not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            capacity = {link: self._capacity[link] for flow in flows for link in flow.links}
            self._known[name] = fair_rates(name, capacity)
        return self._known[name]

    def _reached(self, links: Iterable[Link]) -> set[int]:
        """Return flows over these links, flows that share a link with them, and so on."""
        found: set[int] = set()
        seen: set[Link] = set()
        left = list(links)
        while left:
            link = left.pop()
            if link not in seen:
                seen.add(link)
                for number in self._on[link] - found:
                    found.add(number)
                    left += self._moving[number].flow.links
        return found


def ends_s(
    transfers: WorkerTransfers, requests: Sequence[tuple[float, Hashable, WorkerFlow]]
) -> list[float]:
    """Return the ends of flows that begin on idle links.

    Args:
        transfers: with nothing under way.
        requests: earliest begin, lane and flow; the flows of a lane run one after the other, in
            this order.
    """
    found = [0.0] * len(requests)
    lanes: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for number, (_, lane, _) in enumerate(requests):
        lanes[lane].append(number)
    starts = [(requests[row[0]][0] + requests[row[0]][2].fixed_s, row[0]) for row in lanes.values()]
    heapq.heapify(starts)
    while starts or transfers.next_end_s < math.inf:
        if starts and starts[0][0] <= transfers.next_end_s:
            now_s, number = heapq.heappop(starts)
            transfers.begin(now_s, requests[number][2], number)
            continue
        now_s = transfers.next_end_s
        for number in transfers.ended(now_s):
            found[number] = now_s
            waiting = lanes[requests[number][1]]
            waiting.popleft()
            if waiting:
                ready_s, _, flow = requests[waiting[0]]
                heapq.heappush(starts, (max(ready_s, now_s) + flow.fixed_s, waiting[0]))
    return found
