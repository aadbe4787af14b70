"""What messages and all-reduces between classes of devices take at least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from networkx.utils import UnionFind

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.verification.proof.figures import FAR, BoolArray, FloatArray, IntArray
from planner.verification.routes import Edge, Lane, Path, Routes, ring_and_tree

FEW_CLASSES = 6
"""With more classes of devices single lanes are looked at, not pairs of them."""
WIDER = 1.5
"""By this factor links are wider than others, as those of a node than those between nodes."""


class Growth(NamedTuple):
    """Sets of devices that grow over ever narrower links (Kruskal 1956): a row for each join.

    Devices that one row joins and no row before it are joined by no wider link.

    Attributes:
        s_per_byte: of the link that joins.
        latency_s: least, of this link and all that follow.
        devices: in the set that is joined, by class.
    """

    s_per_byte: FloatArray
    latency_s: FloatArray
    devices: IntArray

    def worst(self, kept: IntArray, count: int, most: IntArray) -> tuple[float, float]:
        """Return least latency and seconds a byte of the worst link among so many devices.

        Args:
            kept: classes with a device among them.
            count: of devices.
            most: devices of each class.
        """
        has_all = (self.devices[:, kept] > 0).all(axis=1)
        enough = np.minimum(self.devices, most).sum(axis=1) >= count
        rows = np.flatnonzero(has_all & enough)
        if not len(rows):
            return FAR, FAR
        return float(self.latency_s[rows[0]]), float(self.s_per_byte[rows[0]])


def _grown(edges: Iterable[tuple[float, float, Edge]], counts: Mapping[str, IntArray]) -> Growth:
    """Return how sets grow.

    Args:
        edges: seconds a byte, latency and ends, the widest first.
        counts: of each end, how many devices of each class it is.
    """
    slowness, latencies, ends = zip(*edges, strict=True) if edges else ((), (), ())
    least_s = np.minimum.accumulate(np.array(latencies)[::-1])[::-1]
    sets, held, rows = UnionFind(counts), dict(counts), []
    for number, (first, second) in enumerate(ends):
        one, other = sets[first], sets[second]
        if one != other:
            sets.union(one, other)
            held[sets[one]] = joined = held[one] + held[other]
            rows.append((number, joined))
    chosen = np.array([number for number, _ in rows], dtype=int)
    classes = len(next(iter(counts.values())))
    devices = np.array([joined for _, joined in rows]).reshape(len(rows), classes)
    return Growth(np.array(slowness)[chosen], least_s[chosen], devices)


class ClassLinks:
    """Least figures between classes: a row for each that sends, a column for each that receives.

    Args:
        cluster: of all devices.
        classes: names of devices; a stage may lie on any of a class.

    Attributes:
        latency_s, s_per_byte: of the quickest and of the widest path between two devices; the same
            in both directions.
        is_exclusive: whether the messages from one device to another follow each other.
        port_s_per_byte: what the links of a device of each class carry together at best, in each
            direction; 0 if some link carries any number of messages at once.
        takes_turns: whether every link of all devices carries one direction at a time, by class.
        sizes: of the classes.
    """

    def __init__(self, cluster: Cluster, classes: Sequence[Sequence[str]]) -> None:
        self._links, self._order = cluster.links, cluster.device_names
        self._routes, self._classes = Routes(cluster), classes
        self.sizes = np.array([len(members) for members in classes])
        count = len(classes)
        self.latency_s, self.s_per_byte = np.full((2, count, count), FAR)
        self.is_exclusive = np.ones((count, count), dtype=bool)
        # By lane, the pairs of classes between which every path holds it.
        self._carried: defaultdict[Lane, set[tuple[int, int]]] = defaultdict(set)
        for a, b in product(range(count), repeat=2):
            if paths := list(self._paths(a, b)):
                self.latency_s[a, b] = min(path.latency_s for path in paths)
                self.s_per_byte[a, b] = min(1 / path.bytes_per_s for path in paths)
                self.is_exclusive[a, b] = all(path.lanes for path in paths)
                for lane in set.intersection(*(set(path.lanes) for path in paths)):
                    self._carried[lane].add((a, b))
        ports = [[self._port(name) for name in members] for members in classes]
        self.port_s_per_byte = np.array([min(s for s, _ in rows) for rows in ports])
        self.takes_turns = np.array([all(turns for _, turns in rows) for rows in ports])
        self._cuts, self._growth = cache(self._cuts_between), cache(self._growth_among)

    def _paths(self, a: int, b: int) -> Iterator[Path]:
        """Paths from one class to another; of devices attached alike, those of three."""
        for source, target in product(*(self._representatives(k) for k in (a, b))):
            if source != target:
                with suppress(PipeplanError):  # No path: no figure is less than that of none.
                    yield self._routes.path(source, target)

    def _representatives(self, k: int) -> list[str]:
        alike: dict[object, list[str]] = {}
        for device in self._classes[k]:
            alike.setdefault(self._routes.attachment(device), []).append(device)
        # With three no link of a single device is on all paths, unless there is no other device.
        return [name for names in alike.values() for name in (*names[:2], *names[2:][-1:])]

    def _port(self, device: str) -> tuple[float, bool]:
        """Return seconds a byte of a device's links together, and whether they all take turns."""
        links = [link for link in self._links if device in link.between]
        if any(link.shared for link in links):
            return 0.0, False
        width = 1e9 * sum(link.bandwidth_gb_per_s for link in links)
        return 1 / width if width else FAR, all(link.duplex == "half" for link in links)

    def message_s(self, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of messages between classes, 0 of nothing; classes come last."""
        size = bytes_[..., None, None]
        seconds = np.minimum(self.latency_s + size * self.s_per_byte, FAR)
        return np.where(size > 0, seconds, 0.0)

    # --- sets of devices: a number for each class -------------------------------------------------

    def flow_s_per_byte(self, senders: IntArray, receivers: IntArray) -> FloatArray:
        """Return seconds a byte if everything between two sets moves at once, for rows of both.

        Lanes and ports that everything has to pass carry no more than their bandwidths together.
        """
        ports, both = 1 / np.maximum(self.port_s_per_byte, 1 / FAR), np.hstack([senders, receivers])
        give, take = senders * ports, receivers * ports
        kinds, kind = np.unique(both > 0, axis=0, return_inverse=True)
        width = np.zeros(len(both))
        for number, held in enumerate(kinds):
            rows = kind.reshape(-1) == number
            widths, senders_left, receivers_left = self._cuts(*map(_held, np.split(held, 2)))
            rest = np.minimum(give[rows] @ senders_left, take[rows] @ receivers_left)
            width[rows] = (widths + rest).min(axis=1)
        return 1 / width

    def _cuts_between(
        self, senders: tuple[int, ...], receivers: tuple[int, ...]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return cuts of one lane or two, and which classes' messages may pass none of them.

        Returns:
            Bytes a second of the lanes of each cut; whether messages of a sender (row), and to a
            receiver, may pass none of a cut's lanes (column).
        """
        pairs = set(product(senders, receivers))
        lanes = [lane for lane, carried in self._carried.items() if not pairs.isdisjoint(carried)]
        cuts: dict[frozenset[tuple[int, int]], float] = {}
        most = 2 if len(self._classes) <= FEW_CLASSES else 1
        for chosen in (chosen for n in range(most + 1) for chosen in combinations(lanes, n)):
            rest = frozenset(pairs.difference(*(self._carried[lane] for lane in chosen)))
            width = sum(self._links[number].bandwidth_gb_per_s * 1e9 for number, _ in chosen)
            cuts[rest] = min(width, cuts.get(rest, math.inf))
        left = np.zeros((2, len(self._classes), len(cuts)))
        for number, rest in enumerate(cuts):
            for a, b in rest:
                left[0, a, number] = left[1, b, number] = 1.0
        return np.array([*cuts.values()]), left[0], left[1]

    def all_reduce_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over a set, for each number of bytes."""
        count = int(held.sum())
        if count < 2:
            return np.zeros_like(bytes_)
        if ((held == 0) | (held == self.sizes)).all():
            return np.where(bytes_ > 0, self._exact_s(held, bytes_), 0.0)
        return self.reduced_s(held > 0, count, bytes_, held)

    def _exact_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the better of ring and tree over all devices of the classes held."""
        members = {name for k in _held(held) for name in self._classes[k]}
        devices = [name for name in self._order if name in members]
        count, (ring, tree) = len(devices), ring_and_tree(devices)
        try:
            return np.minimum(
                2 * (count - 1) * self._step_s(ring, bytes_ / count),
                2 * math.ceil(math.log2(count)) * self._step_s(tree, bytes_),
            )
        except PipeplanError:
            return np.full_like(bytes_, FAR)

    def _step_s(self, edges: Sequence[Edge], bytes_: FloatArray) -> FloatArray:
        figures = set(self._routes.step_figures(edges))
        return np.asarray(np.max([latency + bytes_ / width for latency, width in figures], axis=0))

    def reduced_s(
        self, kept: BoolArray, count: int, bytes_: FloatArray, most: IntArray | None = None
    ) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices or more.

        The worst link that joins them takes part, and the best link of a device of each class kept.

        Args:
            kept: classes of which there is a device, by class.
            count: of devices, at least two.
            bytes_: that are reduced.
            most: devices of each class; None: all there are.
        """
        most = self.sizes if most is None else most
        own, others = np.flatnonzero(kept), np.flatnonzero(most)
        # A device of a class is joined to one of its own class only if there are two.
        apart = (own[:, None] != others) | (most[others] > 1)
        latency_s, s_per_byte = (
            np.where(apart, table[np.ix_(own, others)], FAR).min(axis=1)
            for table in (self.latency_s, self.s_per_byte)
        )
        turns = np.where(self.takes_turns, 2 * self.port_s_per_byte, 0.0)[own]
        worst = self._growth(tuple(others.tolist())).worst(own, count, most)
        rows = [*zip(latency_s, s_per_byte, turns, strict=True), worst]
        longest = np.max([reduction_s(count, bytes_, *row) for row in rows], axis=0)
        return np.where(bytes_ > 0, np.minimum(longest, FAR), 0.0)

    def _growth_among(self, among: tuple[int, ...]) -> Growth:
        """Return how sets of devices of some classes grow."""
        unit = np.eye(len(self.sizes), dtype=int)
        counts = {name: unit[k] for k in among for name in self._classes[k]}
        edges = []
        for ends in combinations(counts, 2):
            with suppress(PipeplanError):  # No path: they are joined by others, if at all.
                path = self._routes.path(*ends)
                edges.append((1 / path.bytes_per_s, path.latency_s, ends))
        return _grown(sorted(edges), counts)

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


class AnyLinks:
    """The best links of a cluster, for devices wherever they are.

    Args:
        cluster: of all devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        counts = {name: np.array([1]) for name in cluster.device_names}
        counts |= {name: np.array([0]) for name in cluster.switches}
        links = sorted(cluster.links, key=lambda link: -link.bandwidth_gb_per_s)
        growth = _grown(
            [
                (1 / (link.bandwidth_gb_per_s * 1e9), link.latency_us * 1e-6, link.between)
                for link in links
            ],
            counts,
        )
        self._cluster = cluster
        switches, latencies, at_device = set(cluster.switches), [], dict[str, float]()
        for link in cluster.links:
            ends = set(link.between) - switches
            if len(ends) == 2:
                latencies.append(link.latency_us)
            for end in ends if len(ends) == 1 else ():
                at_device[end] = min(link.latency_us, at_device.get(end, math.inf))
        if len(at_device) > 1:
            latencies.append(sum(sorted(at_device.values())[:2]))
        # Of a link between two devices, or of the links at two of them.
        least_s = self._latency_s = min(latencies, default=0.0) * 1e-6
        devices = np.array([len(cluster.devices)])
        worst = (growth.worst(np.array([0]), n, devices) for n in range(2, int(devices[0]) + 2))
        # By number of devices; for none and one of them nothing is reduced.
        self._worst = np.array([(FAR, FAR)] * 2 + [(max(least_s, s), each) for s, each in worst])

    def message_s(self, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of a message; 0 where nothing is sent."""
        seconds = self._latency_s + bytes_ * self._worst[2, 1]
        return np.where(bytes_ > 0, np.minimum(seconds, FAR), 0.0)

    def message_at_s(self, types: Sequence[str], bytes_: FloatArray) -> FloatArray:
        """Return the same for messages of a device of each type, which pass a link at it."""
        widest = dict.fromkeys(types, 1 / FAR)
        for link in self._cluster.links:
            for name in set(link.between) - set(self._cluster.switches):
                kind = self._cluster.type_of(name)
                widest[kind] = max(widest[kind], link.bandwidth_gb_per_s * 1e9)
        each = np.maximum([1 / width for width in widest.values()], self._worst[2, 1])
        seconds = self._latency_s + bytes_ * each[:, None]
        return np.where(bytes_ > 0, np.minimum(seconds, FAR), 0.0)

    def all_reduce_s(self, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices or more."""
        figures = np.moveaxis(self._worst[np.minimum(replicas, len(self._worst) - 1)], -1, 0)
        seconds = np.minimum(reduction_s(np.maximum(replicas, 2), bytes_, *figures), FAR)
        return np.where((replicas > 1) & (bytes_ > 0), seconds, 0.0)


def _held(vector: IntArray | BoolArray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(vector).tolist())


def reduction_s(
    count: int | IntArray,
    bytes_: FloatArray,
    latency_s: float | FloatArray,
    s_per_byte: float | FloatArray,
    in_turns_s_per_byte: float = 0.0,
) -> FloatArray:
    """Return the least seconds of an all-reduce of which a link takes part in every step.

    A ring takes 2 (r - 1) steps of an r-th of the bytes, a tree 2 log2(r) of all of them.

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
