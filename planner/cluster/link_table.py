"""Latency and bandwidth between all pairs of devices."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from networkx.utils import UnionFind
from numpy.typing import NDArray

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LEAST_STEP = 1.5
"""A drop of bandwidth by this factor separates groups of devices, as nodes on a network."""


class Port(NamedTuple):
    """The total capacity of a device's links.

    Attributes:
        s_per_byte: seconds per byte in each direction; 0 if some link carries any number of
            transfers at once.
        is_half_duplex: whether both directions take turns on every link.
    """

    s_per_byte: float
    is_half_duplex: bool


class LinkTable:
    """Latency and seconds per byte between all pairs of devices, by their numbers in the cluster.

    Attributes:
        latency_s, s_per_byte: infinite without a path, 0 from a device to itself.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        count = len(cluster.device_names)
        self.latency_s = np.zeros((count, count))
        self.s_per_byte = np.zeros((count, count))
        for first, second in product(self._alike(), repeat=2):
            self._fill(first, second)
        np.fill_diagonal(self.latency_s, 0.0)
        np.fill_diagonal(self.s_per_byte, 0.0)

    def _alike(self) -> list[IntArray]:
        """Sets of devices with equal routes to all other devices."""
        classes: dict[Hashable, list[int]] = {}
        for number, name in enumerate(self.cluster.device_names):
            classes.setdefault(self.cluster.attachment(name), []).append(number)
        return [np.array(numbers) for numbers in classes.values()]

    def _fill(self, first: IntArray, second: IntArray) -> None:
        u, v = first[0], second[-1]
        if u == v:
            return
        names = self.cluster.device_names
        route = self.cluster.route(names[u], names[v])
        block = np.ix_(first, second)
        if route is None:
            self.latency_s[block] = self.s_per_byte[block] = np.inf
            return
        self.latency_s[block] = route.latency_s
        self.s_per_byte[block] = 1 / (route.bandwidth_gb_per_s * 1e9)

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.latency_s)

    @cached_property
    def ports(self) -> list[Port]:
        """The port of every device, by number; all that it sends and receives passes through it."""
        return [self._port(name) for name in self.cluster.device_names]

    def _port(self, device: str) -> Port:
        links = [link for link in self.cluster.links if device in link.between]
        if any(link.shared for link in links):
            return Port(0.0, is_half_duplex=False)
        width = 1e9 * sum(link.bandwidth_gb_per_s for link in links)
        is_half = bool(links) and all(link.duplex == "half" for link in links)
        return Port(1 / width if width else np.inf, is_half)

    @cached_property
    def _widening(self) -> list[tuple[float, int, int]]:
        """The edges of a maximum spanning forest by bandwidth, widest first (Kruskal 1956)."""
        source, target = np.triu_indices(self.count, 1)
        inverse = np.minimum(self.s_per_byte[source, target], self.s_per_byte[target, source])
        forest = UnionFind(range(self.count))
        edges: list[tuple[float, int, int]] = []
        for edge in np.argsort(inverse, kind="stable"):
            u, v = int(source[edge]), int(target[edge])
            if len(edges) == self.count - 1 or not np.isfinite(inverse[edge]):
                break
            if forest[u] != forest[v]:
                forest.union(u, v)
                edges.append((float(inverse[edge]), u, v))
        return edges

    @cached_property
    def groups(self) -> IntArray | None:
        """The group of each device, such as a node: devices joined by wide links.

        They are split at the largest drop of bandwidth; None without a clear drop.
        """
        edges = self._widening
        if len(edges) < 2:
            return None
        slow = np.array([inverse for inverse, _, _ in edges])
        steps = slow[1:] / slow[:-1]
        cut = int(steps.argmax())
        if steps[cut] < LEAST_STEP:
            return None
        forest = UnionFind(range(self.count))
        for _, u, v in edges[: cut + 1]:
            forest.union(u, v)
        roots = [forest[device] for device in range(self.count)]
        numbers = {root: number for number, root in enumerate(dict.fromkeys(roots))}
        return np.array([numbers[root] for root in roots])
