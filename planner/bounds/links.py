"""What passes between classes of devices takes at least: messages, ports and all-reduces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from networkx.utils import UnionFind

from planner.bounds.layers import FAR, FloatArray, IntArray
from planner.cluster.cluster import Cluster
from planner.cluster.collective_algorithms import all_reduce_algorithms
from planner.cluster.routing import Route

FEW_CLASSES = 6
"""With more classes of devices single links are taken for what limits a flow, not pairs of them."""
WIDER = 1.5
"""By this factor links are wider than others, as those of a node than those between nodes."""


class _Cut(NamedTuple):
    """Links, and classes whose messages may pass none of them.

    Attributes:
        bytes_per_s: of the links together.
        senders, receivers: of the other messages.
    """

    bytes_per_s: float
    senders: frozenset[int]
    receivers: frozenset[int]


class _Growth(NamedTuple):
    """Sets of devices that grow over ever narrower links (Kruskal 1956), a row for each join.

    Attributes:
        latency_s: least of any link that is no wider than the one that joins.
        s_per_byte: of the widest link between the two sets.
        devices: of the joined set, by class.
    """

    latency_s: FloatArray
    s_per_byte: FloatArray
    devices: IntArray


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
        for cut in self._cuts(tuple(give), tuple(take)):
            ports = sum(give[k] for k in cut.senders), sum(take[k] for k in cut.receivers)
            width = min(width, cut.bytes_per_s + min(ports))
        return 1 / max(width, 1 / FAR)

    def _cuts_between(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> list[_Cut]:
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
            _Cut(width, frozenset(a for a, _ in rest), frozenset(b for _, b in rest))
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
        return self.spread_reduce_s(held, count, bytes_)

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

    def spread_reduce_s(self, held: IntArray, count: int, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices or more.

        Args:
            held: of each class so many at most, and at least one where it is not 0.
            count: of devices, at least.
            bytes_: that are reduced, of any shape.
        """
        kept = np.nonzero(held)[0]
        alone = ~np.eye(len(kept), dtype=bool) | (held[kept] > 1)[:, None]
        block = np.ix_(kept, kept)
        latency_s, inverse = (
            np.where(alone, table[block], FAR)
            for table in (self._best_latency_s, self._best_inverse)
        )
        seconds = self._by_device_s(kept, count, bytes_, latency_s, inverse)
        return self._with_joint_s(seconds, count, bytes_, self.joining(kept, count, held))

    def joined_reduce_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over a set and at least one other device."""
        count, kept = int(held.sum()) + 1, np.nonzero(held)[0]
        tables = self._best_latency_s[kept], self._best_inverse[kept]
        seconds = self._by_device_s(kept, count, bytes_, *tables)
        return self._with_joint_s(seconds, count, bytes_, self.joining(kept, count))

    def _with_joint_s(
        self, seconds: FloatArray, count: int, bytes_: FloatArray, joint: tuple[float, float]
    ) -> FloatArray:
        seconds = np.minimum(np.maximum(seconds, reduced_s(count, bytes_, *joint)), FAR)
        return np.where(bytes_ > 0, seconds, 0.0)

    def _by_device_s(
        self,
        kept: IntArray,
        count: int,
        bytes_: FloatArray,
        latency_s: FloatArray,
        inverse: FloatArray,
    ) -> FloatArray:
        """Return what takes longest of any class: a device of it is joined to some other."""
        rows = [
            reduced_s(count, bytes_, float(latency), float(each), self._turns(int(k)))
            for k, latency, each in zip(kept, latency_s.min(1), inverse.min(1), strict=True)
        ]
        return np.asarray(np.max(rows, axis=0))

    @cached_property
    def _best_latency_s(self) -> FloatArray:
        return np.asarray(np.minimum(self.latency_s, self.latency_s.T))

    @cached_property
    def _best_inverse(self) -> FloatArray:
        return np.asarray(np.minimum(self.s_per_byte, self.s_per_byte.T))

    def _turns(self, k: int) -> float:
        """Return seconds a byte both ways, if a device sends and receives one after the other."""
        return float(2 * self.port_s_per_byte[k]) if self.takes_turns[k] else 0.0

    def alone(self, k: int) -> tuple[float, float, float]:
        """Return the least latency and seconds a byte of a device of a class, and of both ways."""
        return (
            float(self._best_latency_s[k].min()),
            float(self._best_inverse[k].min()),
            self._turns(k),
        )

    def joining(
        self, kept: Sequence[int] | IntArray, count: int, held: IntArray | None = None
    ) -> tuple[float, float]:
        """Return least latency and seconds a byte of the worst link among so many devices.

        Args:
            kept: classes with a device among them.
            count: of devices.
            held: of each class so many at most, all of those kept; None: any devices.
        """
        among = range(len(self.sizes)) if held is None else kept
        growth = self._growth(tuple(int(k) for k in among))
        has_all = (growth.devices[:, list(kept)] > 0).all(axis=1)
        most = self.sizes if held is None else held
        enough = np.minimum(growth.devices, most).sum(axis=1) >= count
        rows = np.flatnonzero(has_all & enough)
        if not len(rows):
            return FAR, FAR
        return float(growth.latency_s[rows[0]]), float(growth.s_per_byte[rows[0]])

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
        devices = np.concatenate([self._members[k] for k in among])
        held = {
            int(d): np.eye(len(self.sizes), dtype=np.int64)[k]
            for k in among
            for d in self._members[k]
        }
        first, second, latency_s, inverse = self._edges(devices)
        least_s = np.minimum.accumulate(latency_s[::-1])[::-1]
        sets, rows = UnionFind(held), []
        for n in range(len(first)):
            a, b = sets[int(first[n])], sets[int(second[n])]
            if a != b:
                sets.union(a, b)
                held[sets[a]] = held[a] + held[b]
                rows.append((least_s[n], inverse[n], held[sets[a]]))
        latencies, inverses, joined = zip(*rows, strict=True) if rows else ((), (), ())
        shape = (len(rows), len(self.sizes))
        return _Growth(np.array(latencies), np.array(inverses), np.array(joined).reshape(shape))

    def _edges(self, devices: IntArray) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        """Return pairs of devices that are joined, by width, in the better direction of each."""
        latency_s, inverse = (
            np.minimum(figure, figure.T) for figure in (self._apart_latency_s, self._apart_inverse)
        )
        a, b = (devices[side] for side in np.triu_indices(len(devices), 1))
        order = np.lexsort((latency_s[a, b], inverse[a, b]))
        order = order[inverse[a, b][order] < FAR]
        a, b = a[order], b[order]
        return a, b, latency_s[a, b], inverse[a, b]


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
