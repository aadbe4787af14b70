"""The links between workers, and what messages and rings of messages take of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from planner.cluster.cluster import Cluster, node_of
from planner.errors import PipeplanError
from planner.simulation.fair_rates import Link


@dataclass(frozen=True)
class WorkerFlow:
    """A message, or a ring of messages that advance together.

    Attributes:
        links: the links that its bytes cross; a ring names a link as often as it crosses it.
        most_gb_per_s: bandwidth of its narrowest route.
        bytes: bytes over each crossing.
        fixed_s: latencies and overheads, before the bytes.
        marks: bytes after which somebody waits for it, ascending, besides all of them.
    """

    links: tuple[Link, ...]
    most_gb_per_s: float
    bytes: float
    fixed_s: float
    marks: tuple[float, ...] = ()

    @cached_property
    def crossed(self) -> Mapping[Link, int]:
        """How often it crosses each of its links."""
        return Counter(self.links)


Route = tuple[tuple[Link, ...], float]
"""The links of a route and the bandwidth of its narrowest one."""


class WorkerRoutes(Protocol):
    """The links between workers."""

    @property
    def capacity_gb_per_s(self) -> Mapping[Link, float]:
        """Bandwidths of links."""

    def route(self, key: int, source: int, target: int) -> Route:
        """Return the route between two workers' devices of a pipeline rank."""


def message(
    routes: WorkerRoutes, source: int, target: int, key: int, bytes_: float, fixed_s: float
) -> WorkerFlow:
    """Return the flow of a message between two workers' devices of a pipeline rank."""
    links, most = routes.route(key, source, target)
    return WorkerFlow(links, most, bytes_, fixed_s)


@dataclass(frozen=True)
class WorkerRing:
    """Members that each send to the next one, and the last to the first.

    Attributes:
        hops: the route from each member to the next.
    """

    hops: tuple[Route, ...]

    @classmethod
    def of(cls, routes: WorkerRoutes, members: Sequence[int], key: int) -> WorkerRing:
        """Return the ring of workers' devices of a pipeline rank, in this order."""
        pairs = zip(members, (*members[1:], members[0]), strict=True)
        return cls(tuple(routes.route(key, *pair) for pair in pairs))

    def flow(self, bytes_: float, fixed_s: float, marks: tuple[float, ...] = ()) -> WorkerFlow:
        """Return the flow of a ring in which each member sends these bytes."""
        links = tuple([link for row, _ in self.hops for link in row])
        return WorkerFlow(links, min([most for _, most in self.hops]), bytes_, fixed_s, marks)

    def ends(
        self, capacity_gb_per_s: Mapping[Link, float], steps: int
    ) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Return when members are done, as fractions of the last one's time, and their places.

        Args:
            capacity_gb_per_s: of links, which carry nothing else.
            steps: 2 (n - 1) of an all-reduce of n members.
        """
        crossed = Counter([link for links, _ in self.hops for link in links])
        rates = [
            min([most, *[capacity_gb_per_s[link] / crossed[link] for link in links]])
            for links, most in self.hops
        ]
        return _ring_ends(tuple(rates), steps)


@lru_cache(10_000)
def _ring_ends(rates: Sequence[float], steps: int) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Return the ends of members, with their places, by the rate of the hop from each.

    In a step a member sends a part once it has received it, and receives another: with d the
    seconds of the hop to a member, ``T(member, step) = d + max(T(member, step - 1), T(previous,
    step - 1))``. Behind fast hops parts of the last steps are not waited for: of two members on one
    node and one on another, the second is done a step before the others.

    Unrolled, the last step of a member ends after the longest of all ways back through the steps,
    each of which stays with a member or goes to the one before. A way that goes back k members
    takes each of their hops once, and is longest if all other steps stay with the slowest of these.
    Once the slowest hop of the ring is among them, going further back makes no way longer.
    """
    count = len(rates)
    # Two rounds of the hops to each member, so that the k-th before it is a slice.
    incoming_s = np.tile(np.roll(1 / np.array(rates), 1), 2)
    taken_s, slowest_s, ends_s = np.zeros(count), np.zeros(count), np.zeros(count)
    for back in range(min(count, steps)):
        before_s = incoming_s[count - back : 2 * count - back]
        taken_s = taken_s + before_s
        slowest_s = np.maximum(slowest_s, before_s)
        ends_s = np.maximum(ends_s, taken_s + (steps - 1 - back) * slowest_s)
        if slowest_s.min() == slowest_s.max():
            break
    places: defaultdict[float, list[int]] = defaultdict(list)
    for place, end in enumerate((ends_s / ends_s.max()).round(3).tolist()):
        places[end].append(place)
    return tuple((end, tuple(places[end])) for end in sorted(places))


@dataclass(frozen=True)
class NodeLinks:
    """Nodes whose workers share network cards, on a network that is never full.

    A device has a link to its node, and each of a node's cards a link to the others; every link has
    its bandwidth in each direction. Where a node has one worker, its card is all there is.

    Attributes:
        workers: number of workers.
        cards: network card of each pipeline rank.
        pipelines_per_node: workers that share a node.
        within_gb_per_s, between_gb_per_s: bandwidths of a device's link and of a card's.
    """

    workers: int
    cards: tuple[int, ...]
    pipelines_per_node: int
    within_gb_per_s: float
    between_gb_per_s: float

    @cached_property
    def capacity_gb_per_s(self) -> dict[Link, float]:
        """Bandwidths of devices' links, then of cards'."""
        devices = self.workers * len(self.cards)
        nodes = -(-self.workers // self.pipelines_per_node)
        number = devices + nodes * self._cards_of_node
        return {
            (index, direction): self.within_gb_per_s if index < devices else self.between_gb_per_s
            for index in range(number)
            for direction in (-1, 1)
        }

    def route(self, key: int, source: int, target: int) -> Route:
        """Return the route between two workers' devices of a pipeline rank."""
        if source == target:
            return (), math.inf
        leaving, arriving = self._device(key, source), self._device(key, target)
        nodes = source // self.pipelines_per_node, target // self.pipelines_per_node
        if nodes[0] == nodes[1]:
            return ((leaving, 1), (arriving, -1)), self.within_gb_per_s
        cards = ((self._card(key, nodes[0]), 1), (self._card(key, nodes[1]), -1))
        if self.pipelines_per_node == 1:
            return cards, self.between_gb_per_s
        most = min(self.within_gb_per_s, self.between_gb_per_s)
        return ((leaving, 1), *cards, (arriving, -1)), most

    def _device(self, key: int, worker: int) -> int:
        return worker * len(self.cards) + key

    def _card(self, key: int, node: int) -> int:
        devices = self.workers * len(self.cards)
        return devices + node * self._cards_of_node + self.cards[key]

    @cached_property
    def _cards_of_node(self) -> int:
        return max(self.cards) + 1


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

    def route(self, key: int, source: int, target: int) -> Route:
        """Return the route between two workers' devices of a pipeline rank.

        Raises:
            PipeplanError: if no links join them.
        """
        name = (key, source, target)
        if name not in self._routes:
            self._routes[name] = self._found_route(*name)
        return self._routes[name]

    @cached_property
    def _routes(self) -> dict[tuple[int, int, int], Route]:
        """Return the routes that have been found."""
        return {}

    def _found_route(self, key: int, source: int, target: int) -> Route:
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
