"""What passes between classes of devices takes at least: messages, ports and all-reduces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from networkx.utils import UnionFind

from planner.bounds.layers import FAR, BoolArray, FloatArray, IntArray
from planner.cluster.cluster import Cluster
from planner.cluster.collective_algorithms import all_reduce_algorithms
from planner.cluster.routing import Route

FEW_CLASSES = 6
"""The most classes of devices for which pairs of links limit a flow; with more, single ones do."""
WIDER = 1.5
"""By this factor links are wider than others, as those of a node than those between nodes."""


_Cuts = list[tuple[float, frozenset[int], frozenset[int]]]


class _Growth(NamedTuple):
    """Sets of devices that grow over ever narrower links (Kruskal 1956), a row for each join.

    Devices in different sets are not joined by wider links, by whatever switches or other devices.

    Attributes:
        latency_s: least of any link that is no wider than the one that joins.
        s_per_byte: of the widest link between the two sets.
        devices: of the joined set, by class.
    """

    latency_s: FloatArray
    s_per_byte: FloatArray
    devices: IntArray

    def worst(self, kept: IntArray, count: int, most: IntArray) -> tuple[float, float]:
        """Return least latency and seconds a byte of the worst link among so many devices.

        Args:
            kept: classes with a device among them.
            count: of devices.
            most: of each class so many at most.
        """
        has_all = (self.devices[:, kept] > 0).all(axis=1)
        rows = np.flatnonzero(has_all & (np.minimum(self.devices, most).sum(axis=1) >= count))
        if not len(rows):
            return FAR, FAR
        return float(self.latency_s[rows[0]]), float(self.s_per_byte[rows[0]])


def _grown(
    ends: Sequence[tuple[str, str]],
    latency_s: FloatArray,
    s_per_byte: FloatArray,
    counts: Mapping[str, IntArray],
) -> _Growth:
    """Return how sets grow.

    Args:
        ends: of links, the widest first.
        latency_s: of each link.
        s_per_byte: of each link.
        counts: of each end, how many devices of each class it is.
    """
    least_s = np.minimum.accumulate(latency_s[::-1])[::-1]
    sets, held = UnionFind(counts), dict(counts)
    rows, devices = [], []
    for number, (first, second) in enumerate(ends):
        one, other = sets[first], sets[second]
        if one != other:
            sets.union(one, other)
            held[sets[one]] = held[one] + held[other]
            rows.append(number)
            devices.append(held[sets[one]])
    shape = (len(rows), len(next(iter(counts.values()))))
    joined = np.array(devices, dtype=np.int64).reshape(shape)
    return _Growth(least_s[rows], s_per_byte[rows], joined)


class ClassLinks:
    """Least figures between C classes of devices: row: the class that sends, column: receives.

    Args:
        cluster: of all devices.
        classes: names of devices; a stage may lie on any devices of a class.

    Attributes:
        latency_s, s_per_byte: (C, C) of the quickest and of the widest route between two devices.
        is_exclusive: (C, C) whether messages from one device to another follow each other.
        port_s_per_byte: (C) of the widest links of a device, in each direction; 0 if some link
            carries any number of messages at once.
        takes_turns: (C) whether all links of all devices carry one direction at a time.
        sizes: (C) devices.
    """

    def __init__(self, cluster: Cluster, classes: Sequence[Sequence[str]]) -> None:
        self._cluster, self._classes = cluster, classes
        self._members = [np.array([cluster.numbers[n] for n in names]) for names in classes]
        self.sizes = np.array([len(members) for members in classes])
        table, count = cluster.link_table, len(classes)
        apart = np.where(np.eye(table.count, dtype=bool), np.inf, 0.0)
        self._apart_latency_s, self._apart_inverse = (
            np.minimum(figure + apart, FAR) for figure in (table.latency_s, table.s_per_byte)
        )
        self.latency_s, self.s_per_byte = (
            self._least(figure) for figure in (self._apart_latency_s, self._apart_inverse)
        )
        self.is_exclusive = np.ones((count, count), dtype=bool)
        # By link resource, the pairs of classes between which all routes cross it.
        self._crossed: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for a, b in product(range(count), repeat=2):
            self._note_routes(a, b, list(self._routes(a, b)))
        ports = [[table.ports[device] for device in members] for members in self._members]
        self.port_s_per_byte = np.array([min(p.s_per_byte for p in row) for row in ports])
        self.takes_turns = np.array([all(p.is_half_duplex for p in row) for row in ports])
        self._cuts, self._growth = cache(self._cuts_between), cache(self._growth_of)

    def _least(self, figure: FloatArray) -> FloatArray:
        rows = [[figure[np.ix_(a, b)].min() for b in self._members] for a in self._members]
        return np.array(rows)

    def _routes(self, a: int, b: int) -> Iterator[Route]:
        for ends in product(self._representatives(a), self._representatives(b)):
            route = self._cluster.route(*ends) if ends[0] != ends[1] else None
            if route is not None:
                yield route

    def _representatives(self, k: int) -> list[str]:
        """Return three devices of each set of devices with equal routes.

        With three no link of a single device is on all routes, unless there is no other device.
        """
        alike: defaultdict[object, list[str]] = defaultdict(list)
        for device in self._classes[k]:
            alike[self._cluster.attachment(device)].append(device)
        return [name for names in alike.values() for name in (*names[:2], *names[2:][-1:])]

    def _note_routes(self, a: int, b: int, routes: Sequence[Route]) -> None:
        if routes:
            self.is_exclusive[a, b] = all(route.links for route in routes)
            for link in set.intersection(*(set(route.links) for route in routes)):
                self._crossed[link].add((a, b))

    # --- messages ---------------------------------------------------------------------------------

    def flow_s_per_byte(self, senders: IntArray, receivers: IntArray) -> float:
        """Return the seconds a byte if everything between two sets of devices moves at once.

        Links and ports that all of it has to pass carry no more than their bandwidth together.

        Args:
            senders: devices of each class.
            receivers: devices of each class.
        """
        give, take = (
            {
                int(k): vector[k] / max(self.port_s_per_byte[k], 1 / FAR)
                for k in np.nonzero(vector)[0]
            }
            for vector in (senders, receivers)
        )
        width = math.inf
        for bytes_per_s, sources, targets in self._cuts(tuple(give), tuple(take)):
            ports = sum(give[k] for k in sources), sum(take[k] for k in targets)
            width = min(width, bytes_per_s + min(ports))
        return 1 / max(width, 1 / FAR)

    def _cuts_between(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> _Cuts:
        """Return what links carry, and classes whose messages may pass none of them: both ends."""
        pairs = set(product(senders, receivers))
        links = [link for link, crossed in self._crossed.items() if not pairs.isdisjoint(crossed)]
        widths = {n: self._cluster.links[n[0]].bandwidth_gb_per_s * 1e9 for n in links}
        most = 2 if len(self._classes) <= FEW_CLASSES else 1
        least: dict[frozenset[tuple[int, int]], float] = {}
        for chosen in (chosen for n in range(most + 1) for chosen in combinations(links, n)):
            rest = frozenset(pairs.difference(*(self._crossed[link] for link in chosen)))
            width = sum(widths[link] for link in chosen)
            least[rest] = min(width, least.get(rest, math.inf))
        return [
            (width, frozenset(a for a, _ in rest), frozenset(b for _, b in rest))
            for rest, width in least.items()
        ]

    # --- all-reduces ------------------------------------------------------------------------------

    def all_reduce_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over a set, for each number of bytes.

        Args:
            held: devices of each class.
            bytes_: of any shape.
        """
        count = int(held.sum())
        if count < 2:
            return np.zeros_like(bytes_)
        if np.isin(held - self.sizes * (held > 0), 0).all():
            return np.where(bytes_ > 0, self._exact_s(held, bytes_), 0.0)
        return self.least_reduce_s(held > 0, count, bytes_, held)

    def _exact_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the better of ring and tree over all devices of the classes that are held."""
        members = sorted(int(d) for k in np.nonzero(held)[0] for d in self._members[k])
        names = [self._cluster.device_names[number] for number in members]
        seconds = np.full_like(bytes_, FAR)
        for steps, share, edges in all_reduce_algorithms(names, 2**40):
            messages = self._cluster.at_once(tuple(edges))
            if messages is not None:
                of_all = bytes_ * (share / 2**40)
                rows = [latency_s + of_all / (width * 1e9) for latency_s, width in messages]
                np.minimum(seconds, steps * np.max(rows, axis=0), out=seconds)
        return seconds

    def least_reduce_s(
        self, kept: BoolArray, count: int, bytes_: FloatArray, most: IntArray | None = None
    ) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices or more.

        The worst link that joins them takes part, and the best link of a device of each class kept.

        Args:
            kept: (C) classes of which there is a device.
            count: of devices, at least two.
            bytes_: that are reduced, of any shape.
            most: (C) devices of each class; None: all there are.
        """
        most = self.sizes if most is None else most
        own, others = np.flatnonzero(kept), np.flatnonzero(most)
        # A device of a class is joined to one of its own class only if there are two.
        apart = (own[:, None] != others) | (most[others] > 1)
        latency_s, inverse = (
            np.where(apart, np.minimum(table, table.T)[np.ix_(own, others)], FAR).min(axis=1)
            for table in (self.latency_s, self.s_per_byte)
        )
        turns = np.where(self.takes_turns, 2 * self.port_s_per_byte, 0.0)[own]
        worst = self._growth(tuple(others.tolist())).worst(own, count, most)
        rows = [*zip(latency_s, inverse, turns, strict=True), worst]
        longest = np.max([reduced_s(count, bytes_, *row) for row in rows], axis=0)
        return np.where(bytes_ > 0, np.minimum(longest, FAR), 0.0)

    def counts_by_width(self) -> list[tuple[int, int]]:
        """Return ranges of numbers of devices; those of one range are joined by links as wide.

        The last one, over the narrowest links, in two.
        """
        growth, total = self._growth(tuple(range(len(self.sizes)))), int(self.sizes.sum())
        largest = np.maximum.accumulate(growth.devices.sum(axis=1))
        narrows = growth.s_per_byte[1:] > growth.s_per_byte[:-1] * WIDER
        most = [int(n) for n in np.unique(largest[:-1][narrows]) if n < total]
        middle = math.isqrt(([0, *most][-1] + 1) * total)
        ends = sorted({*most, middle, total})
        return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]

    def _growth_of(self, among: tuple[int, ...]) -> _Growth:
        """Return how sets of devices of some classes grow, over the better direction of pairs."""
        unit, names = np.eye(len(self.sizes), dtype=np.int64), self._cluster.device_names
        counts = {names[d]: unit[k] for k in among for d in self._members[k]}
        devices = np.concatenate([self._members[k] for k in among])
        a, b = (devices[side] for side in np.triu_indices(len(devices), 1))
        latency_s, inverse = (
            np.minimum(figure, figure.T)[a, b]
            for figure in (self._apart_latency_s, self._apart_inverse)
        )
        order = np.lexsort((latency_s, inverse))
        order = order[inverse[order] < FAR]
        ends = [(names[one], names[other]) for one, other in zip(a[order], b[order], strict=True)]
        return _grown(ends, latency_s[order], inverse[order], counts)


class AnyLinks:
    """The best links of a cluster of R devices, for devices wherever they are.

    Args:
        cluster: of the devices.

    Attributes:
        latency_s: least, of a link between two devices or of the links at two of them.
        joint_latency_s, joint_s_per_byte: (R + 2) of the worst link that so many devices need.
    """

    def __init__(self, cluster: Cluster) -> None:
        switches = set(cluster.switches)
        latencies, at_device = [], dict[str, float]()
        for link in cluster.links:
            ends = set(link.between) - switches
            if len(ends) == 2:
                latencies.append(link.latency_us)
            for end in ends if len(ends) == 1 else ():
                at_device[end] = min(link.latency_us, at_device.get(end, math.inf))
        if len(at_device) > 1:
            latencies.append(sum(sorted(at_device.values())[:2]))
        self.latency_s = min(latencies, default=0.0) * 1e-6
        counts = {name: np.array([0]) for name in cluster.switches}
        counts |= {name: np.array([1]) for name in cluster.device_names}
        links = sorted(cluster.links, key=lambda link: -link.bandwidth_gb_per_s)
        growth = _grown(
            [link.between for link in links],
            np.array([link.latency_us * 1e-6 for link in links]),
            np.array([1 / (link.bandwidth_gb_per_s * 1e9) for link in links]),
            counts,
        )
        total = np.array([len(cluster.devices)])
        rows = [growth.worst(np.array([0]), n, total) for n in range(2, int(total[0]) + 2)]
        joint = np.array([(FAR, FAR)] * 2 + rows)
        self.joint_latency_s, self.joint_s_per_byte = np.maximum(joint, [self.latency_s, 0.0]).T
        self._cluster = cluster

    def message_s(self, bytes_: FloatArray, end_type: str | None = None) -> FloatArray:
        """Return the least message for each number of bytes; a link of an end of a type has it."""
        s_per_byte = self.joint_s_per_byte[2]
        if end_type is not None:
            types = {row.name: row.type for row in self._cluster.devices}
            own = [n for n in self._cluster.links if end_type in map(types.get, n.between)]
            widest = max((n.bandwidth_gb_per_s * 1e9 for n in own), default=1 / FAR)
            s_per_byte = max(s_per_byte, 1 / widest)
        return np.where(bytes_ > 0, np.minimum(self.latency_s + bytes_ * s_per_byte, FAR), 0.0)


def reduced_s(
    count: IntArray | int,
    bytes_: FloatArray,
    latency_s: float | FloatArray,
    s_per_byte: float | FloatArray,
    in_turns_s_per_byte: float = 0.0,
) -> FloatArray:
    """Return the least seconds of an all-reduce of which a link takes part in every step.

    A ring takes 2 (r - 1) steps of an r-th of the bytes (Patarasuk and Yuan 2009), a tree
    2 log2(r) steps of all of them.

    Args:
        count: of devices, at least two.
        bytes_: that are reduced.
        latency_s: of the link.
        s_per_byte: of the link.
        in_turns_s_per_byte: of a device in a ring that sends and receives one after the other.
    """
    each_s = np.maximum(s_per_byte, in_turns_s_per_byte)
    ring = 2 * (count - 1) * (latency_s + bytes_ / count * each_s)
    tree = 2 * np.ceil(np.log2(count)) * (latency_s + bytes_ * s_per_byte)
    return np.asarray(np.minimum(ring, tree))
