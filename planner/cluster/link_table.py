"""Latency and bandwidth between all pairs of devices, and lower bounds derived from them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

NO_LINK = 1e200
"""Seconds per byte without a link: large enough for any bound, small enough not to overflow."""


def moving_s(bytes_: IntArray | FloatArray, latency_s: float, s_per_byte: float) -> FloatArray:
    """Return the seconds to move each number of bytes; 0 for no bytes, over any link."""
    seconds = latency_s + bytes_ * min(s_per_byte, NO_LINK)
    return np.asarray(np.where(bytes_ > 0, seconds, 0.0))


@dataclass(frozen=True)
class DeviceGroups:
    """Devices joined by wide links, such as those of a node.

    Attributes:
        of: group of each device.
        widest_between_gb_per_s: most bandwidth between devices of different groups.
    """

    of: IntArray
    widest_between_gb_per_s: float


class Port(NamedTuple):
    """The total capacity of a device's links.

    Attributes:
        s_per_byte: seconds per byte in each direction; 0 if some link carries any number of
            transfers at once.
        is_half_duplex: whether both directions take turns on every link.
    """

    s_per_byte: float
    is_half_duplex: bool


class ReductionLinks(NamedTuple):
    """Lower bounds on a step of an all-reduce: latency, and seconds per byte."""

    latency_s: float
    s_per_byte: float


class Join(NamedTuple):
    """Two sets of devices, each joined by wider links, and their widest link between them."""

    s_per_byte: float
    first: tuple[int, ...]
    second: tuple[int, ...]


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
        self.is_exclusive = True
        alike = self._alike()
        self._class_of = np.zeros(count, dtype=np.int64)
        for number, first in enumerate(alike):
            self._class_of[first] = number
            for second in alike:
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
        self.is_exclusive = self.is_exclusive and bool(route.links)

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.latency_s)

    @cached_property
    def _others(self) -> FloatArray:
        """Seconds per byte, infinite from a device to itself."""
        return np.where(np.eye(self.count, dtype=bool), np.inf, self.s_per_byte)

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
    def least_latency_s(self) -> float:
        """Least latency between any two devices; 0 if none are joined."""
        others = self.latency_s[np.isfinite(self._others)]
        return float(others.min()) if others.size else 0.0

    def least_s_per_byte_to(self, devices: IntArray) -> float:
        """Return the seconds per byte over the widest link to any of these devices."""
        return float(self._others[:, devices].min(initial=np.inf))

    def least_s_per_byte_from(self, device: int) -> float:
        """Return the seconds per byte over the widest link between a device and any other."""
        return float(min(self._others[device].min(), self._others[:, device].min()))

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
    def joins(self) -> list[Join]:
        """The steps in which a maximum spanning forest grows, widest links first.

        No chain of wider links joins devices on the two sides of a join.
        """
        sides: dict[int, tuple[int, ...]] = {device: (device,) for device in range(self.count)}
        joins = []
        for inverse, u, v in self._widening:
            joins.append(Join(inverse, sides[u], sides[v]))
            both = (*sides[u], *sides[v])
            sides.update(dict.fromkeys(both, both))
        return joins

    @cached_property
    def joint_s_per_byte(self) -> FloatArray:
        """Entry r: any r devices, joined in any way, use a link at least this slow.

        A ring and a tree both join all devices, so one of their links is no wider than the
        narrowest link of the widest spanning tree of the r best joined devices.
        """
        slowest = np.full(self.count + 1, np.inf)
        slowest[:2] = 0.0
        forest, largest = UnionFind(range(self.count)), 1
        for inverse, u, v in self._widening:
            forest.union(u, v)
            size = forest.weights[forest[u]]
            slowest[largest + 1 : size + 1] = inverse
            largest = max(largest, size)
        return slowest

    def reduction(self, devices: Sequence[int]) -> tuple[ReductionLinks, ...]:
        """Return lower bounds for any all-reduce among these devices, in any order.

        A ring and a tree join all devices, so some step uses the worst edge of the widest spanning
        tree; and the device with the worst connection uses its path of least latency and most
        bandwidth, twice if it cannot send and receive at the same time.
        """
        # Two devices of each set of equal ones represent all of them.
        _, first = np.unique(self._class_of[list(devices)], return_index=True)
        others = np.delete(np.array(devices), first)
        _, second = np.unique(self._class_of[others], return_index=True)
        members = np.concatenate([np.array(devices)[first], others[second]])
        apart = np.where(np.eye(len(members), dtype=bool), np.inf, 0.0)
        block = np.ix_(members, members)
        latency_s, s_per_byte = self.latency_s[block] + apart, self.s_per_byte[block] + apart
        ports = [self.ports[device] for device in members]
        turns = [2 * port.s_per_byte if port.is_half_duplex else 0.0 for port in ports]
        alone = (
            ReductionLinks(float(a), max(float(b), both))
            for a, b, both in zip(latency_s.min(axis=1), s_per_byte.min(axis=1), turns, strict=True)
        )
        joint = ReductionLinks(float(latency_s.min()), _narrowest_of_widest_tree(s_per_byte))
        return (joint, *dict.fromkeys(alone))

    @cached_property
    def groups(self) -> DeviceGroups | None:
        """Groups of devices, split at the largest drop of bandwidth; None without a clear drop."""
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
        width = 1e-9 / slow[cut + 1]
        return DeviceGroups(np.array([numbers[root] for root in roots]), float(width))


def _narrowest_of_widest_tree(s_per_byte: FloatArray) -> float:
    """Return the seconds per byte of the worst edge of the best spanning tree (Prim 1957)."""
    best = np.minimum(s_per_byte, s_per_byte.T)
    joined = np.zeros(len(best), dtype=bool)
    reach, worst = best[0].copy(), 0.0
    joined[0] = True
    while not joined.all():
        outside = np.where(joined, np.inf, reach)
        nearest = int(outside.argmin())
        worst = max(worst, float(outside[nearest]))
        if np.isinf(worst):
            break
        joined[nearest] = True
        reach = np.minimum(reach, best[nearest])
    return worst
