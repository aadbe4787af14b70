"""The links between workers, and what messages and rings of messages take of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from planner.cluster.cluster import Cluster, node_of
from planner.cluster.link_table import FloatArray
from planner.errors import PipeplanError
from planner.simulation.network import Link


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

    @cached_property
    def crossed(self) -> Mapping[Link, int]:
        """How often it crosses each of its links."""
        return Counter(self.links)


Route = tuple[tuple[Link, ...], float]
"""The links of a route and the bandwidth of its narrowest one."""


class Routes(Protocol):
    """The links between workers."""

    @property
    def capacity_gb_per_s(self) -> Mapping[Link, float]:
        """Bandwidths of links."""

    def route(self, key: int, source: int, target: int) -> Route:
        """Return the route between two workers' devices of a pipeline rank."""


def message(
    routes: Routes, source: int, target: int, key: int, bytes_: float, fixed_s: float
) -> WorkerFlow:
    """Return the flow of a message between two workers' devices of a pipeline rank."""
    links, most = routes.route(key, source, target)
    return WorkerFlow(links, most, bytes_, fixed_s)


def ring(
    routes: Routes, members: Sequence[int], key: int, bytes_: float, fixed_s: float
) -> WorkerFlow:
    """Return the flow of a ring in which each member sends these bytes to the next one."""
    found = _hops(routes, members, key)
    links = tuple(link for row, _ in found for link in row)
    return WorkerFlow(links, min(most for _, most in found), bytes_, fixed_s)


def _hops(routes: Routes, members: Sequence[int], key: int) -> list[Route]:
    """Return the route from each member of a ring to the next."""
    following = (*members[1:], members[0])
    return [routes.route(key, *pair) for pair in zip(members, following, strict=True)]


def ring_ends(routes: Routes, members: Sequence[int], key: int, steps: int) -> FloatArray:
    """Return when each member of a ring is done, as fractions of the last one's time.

    In a step a member sends a part once it has received it, and receives another: with d the
    seconds of the hop to a member, ``T(member, step) = d + max(T(member, step - 1), T(previous,
    step - 1))``. Behind fast hops parts of the last steps are not waited for: of two members on one
    node and one on another, the second is done a step before the others.

    Args:
        routes: links, idle.
        members: in the order of the ring.
        key: the pipeline rank.
        steps: 2 (n - 1) of an all-reduce of n members.
    """
    found = _hops(routes, members, key)
    crossed = Counter(link for links, _ in found for link in links)
    capacity = routes.capacity_gb_per_s
    rates = [min([most, *(capacity[n] / crossed[n] for n in links)]) for links, most in found]
    incoming_s = np.roll(1 / np.array(rates), 1)
    ends = np.zeros(len(members))
    for _ in range(steps):
        ends = np.maximum(ends, np.roll(ends, 1)) + incoming_s
    return np.asarray(ends / ends.max())


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
        number = devices + nodes * (max(self.cards) + 1)
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
        return devices + node * (max(self.cards) + 1) + self.cards[key]


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
