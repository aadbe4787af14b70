"""The links between workers, and what messages and rings of messages take of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster, node_of
from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError

Route = tuple[tuple[int, ...], float]
"""The links of a route by their numbers, and the bandwidth of its narrowest one."""
Hops = tuple[Route, ...]
"""The route of a message, or of a ring: from each member to the next, and the last to the first."""


@dataclass(frozen=True)
class WorkerFlow:
    """A message, or a ring of messages that advance together.

    Attributes:
        links: the links that its bytes cross; a ring names a link as often as it crosses it.
        most_gb_per_s: bandwidth of its narrowest route.
        bytes: bytes over each crossing.
        fixed_s: latencies and overheads, before the bytes.
        sent_bytes: bytes of all senders together.
    """

    links: NDArray[np.int32]
    most_gb_per_s: float
    bytes: float
    fixed_s: float
    sent_bytes: float


def flow_over(hops: Hops, bytes_: float, fixed_s: float) -> WorkerFlow:
    """Return the flow of a message over one hop, or of a ring whose members each send the bytes."""
    links = np.array([link for row, _ in hops for link in row], np.int32)
    most = min((most for _, most in hops), default=math.inf)
    return WorkerFlow(links, most, bytes_, fixed_s, bytes_ * len(hops))


def ring(routes: Routes, members: Sequence[int], key: int) -> Hops:
    """Return the ring of workers' devices of a pipeline rank, in this order."""
    pairs = zip(members, (*members[1:], members[0]), strict=True)
    return tuple(routes.route(key, *pair) for pair in pairs)


def ring_ends(
    hops: Hops, capacity_gb_per_s: FloatArray, steps: int
) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Return when members are done, as fractions of the last one's time, and their places.

    Args:
        hops: of the ring.
        capacity_gb_per_s: of links, which carry nothing else.
        steps: 2 (n - 1) of an all-reduce of n members.
    """
    crossed = Counter(link for links, _ in hops for link in links)
    rates = [
        min([most, *(float(capacity_gb_per_s[link]) / crossed[link] for link in links)])
        for links, most in hops
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
    its bandwidth in each direction. Where a node has one worker, its card is all there is. A link's
    number is even towards the device or node, and the odd one after it away from it.

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
    def capacity_gb_per_s(self) -> FloatArray:
        """Bandwidths of devices' links, then of cards'."""
        nodes = -(-self.workers // self.pipelines_per_node)
        counts = [self.workers * len(self.cards), nodes * (max(self.cards) + 1)]
        return np.repeat([self.within_gb_per_s, self.between_gb_per_s], np.multiply(2, counts))

    def route(self, key: int, source: int, target: int) -> Route:
        """Return the route between two workers' devices of a pipeline rank."""
        if source == target:
            return (), math.inf
        leaving, arriving = (2 * (end * len(self.cards) + key) for end in (source, target))
        here, there = source // self.pipelines_per_node, target // self.pipelines_per_node
        if here == there:
            return (leaving + 1, arriving), self.within_gb_per_s
        devices, cards = self.workers * len(self.cards), max(self.cards) + 1
        out, back = (2 * (devices + node * cards + self.cards[key]) for node in (here, there))
        if self.pipelines_per_node == 1:
            return (out + 1, back), self.between_gb_per_s
        most = min(self.within_gb_per_s, self.between_gb_per_s)
        return (leaving + 1, out + 1, back, arriving), most


@dataclass(frozen=True)
class WorkerLinks:
    """The routes between the workers' devices.

    A link of the cluster has three numbers: of one direction, of both together, of the other.

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
    def capacity_gb_per_s(self) -> FloatArray:
        """Bandwidths of the cluster's links, in each direction or in both together."""
        found = np.repeat([link.bandwidth_gb_per_s for link in self.cluster.links], 3)
        factors = np.full(len(found), self.between_factor)
        factors[self._within] = self.within_factor
        return np.asarray(found * factors)

    @cached_property
    def _within(self) -> list[int]:
        """Links on a route within a node."""
        found: set[int] = set()
        for row in self.devices:
            for source, target in product(row, row):
                route = self.cluster.route(source, target)
                if node_of(source) == node_of(target) and route is not None:
                    found.update(_numbers(route.links))
        return sorted(found)

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
        """The routes that have been found."""
        return {}

    def _found_route(self, key: int, source: int, target: int) -> Route:
        devices = self.devices[key]
        route = self.cluster.route(devices[source], devices[target])
        if route is None:
            raise PipeplanError(
                f"cluster: no links join {devices[source]!r} and {devices[target]!r}, which "
                "synchronise; add links, or simulate copies of the first pipeline with --pipelines"
            )
        is_within = node_of(devices[source]) == node_of(devices[target])
        factor = self.within_factor if is_within else self.between_factor
        return _numbers(route.links), route.bandwidth_gb_per_s * factor


def _numbers(links: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(3 * index + direction + 1 for index, direction in links)


Routes = NodeLinks | WorkerLinks
"""The links between workers."""
