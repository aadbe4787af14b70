"""What passes between classes of devices takes at least: paths, ports and all-reduces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from networkx.utils import UnionFind

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.verification.proof.layers import BoolArray, FloatArray, IntArray
from planner.verification.routes import Lane, Path, Routes, ring_and_tree

FEW_CLASSES = 6
"""With more classes of devices single lanes are looked at, not pairs of them."""
FAR = 1e60
"""Seconds, or seconds a byte, where no path is: above any bound, and no sum of such overflows."""
WIDER = 1.5
"""By this factor links are wider than others, as those of a node than those between nodes."""


class Growth(NamedTuple):
    """Sets of devices that grow over ever narrower links (Kruskal 1956): a row for each join.

    Attributes:
        s_per_byte: of the widest links between the two sets that are joined.
        latency_s: least, of any link that is no wider.
        devices: in the set that is joined, by class.
    """

    s_per_byte: FloatArray
    latency_s: FloatArray
    devices: IntArray


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
            self._fill(a, b, list(self._paths(a, b)))
        ports = [[self._port(name) for name in members] for members in classes]
        self.port_s_per_byte = np.array([min(s for s, _ in rows) for rows in ports])
        self.takes_turns = np.array([all(turns for _, turns in rows) for rows in ports])
        # Of a device in a ring that sends and receives one after the other.
        self._turns_s_per_byte = np.where(self.takes_turns, 2 * self.port_s_per_byte, 0.0)
        self._cuts = cache(self._cuts_between)
        self._growth = cache(self._growth_of)

    def _fill(self, a: int, b: int, paths: Sequence[Path]) -> None:
        if not paths:
            return
        self.latency_s[a, b] = min(path.latency_s for path in paths)
        self.s_per_byte[a, b] = min(1 / path.bytes_per_s for path in paths)
        self.is_exclusive[a, b] = all(path.lanes for path in paths)
        for lane in set.intersection(*(set(path.lanes) for path in paths)):
            self._carried[lane].add((a, b))

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

    # --- all-reduces ------------------------------------------------------------------------------

    def all_reduce_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over a set, for each number of bytes."""
        count = int(held.sum())
        if count < 2:
            return np.zeros_like(bytes_)
        if ((held == 0) | (held == self.sizes)).all():
            return np.where(bytes_ > 0, self._exact_s(held, bytes_), 0.0)
        return self.spread_reduce_s(held, count, bytes_)

    def spread_reduce_s(self, held: IntArray, count: int, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices or more.

        Args:
            held: of each class so many at most, and at least one where it is not 0.
            count: of devices, at least.
            bytes_: that are reduced.
        """
        kept = np.array(_held(held))
        apart = ~np.eye(len(kept), dtype=bool) | (held[kept] > 1)[:, None]
        joint = self._joining(_held(held), _held(held), held, count)
        return self._reduced_s(count, bytes_, kept, kept, apart, joint)

    def joined_reduce_s(self, held: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over a set and other devices besides."""
        count, kept, everyone = int(held.sum()) + 1, _held(held), np.arange(len(self.sizes))
        apart = np.ones((len(kept), len(everyone)), dtype=bool)
        return self._reduced_s(
            count, bytes_, np.array(kept), everyone, apart, self.joining(kept, count)
        )

    def _reduced_s(
        self,
        count: int,
        bytes_: FloatArray,
        kept: IntArray,
        others: IntArray,
        apart: BoolArray,
        joint: tuple[float, float],
    ) -> FloatArray:
        """Return what takes longest of the worst link, and of the links of a device of any class.

        Args:
            count: of devices.
            bytes_: that are reduced.
            kept: classes of which there is a device; it is joined to some other device.
            others: classes of these.
            apart: whether a device of a kept class (row) may be joined to one of another.
            joint: latency and seconds a byte of the worst link.
        """
        place = np.ix_(kept, others)
        latency_s, s_per_byte = (
            np.where(apart, table[place], FAR).min(axis=1)
            for table in (self.latency_s, self.s_per_byte)
        )
        rows = [
            reduced_s(count, bytes_, *figures)
            for figures in zip(latency_s, s_per_byte, self._turns_s_per_byte[kept], strict=True)
        ]
        most = np.max([*rows, reduced_s(count, bytes_, *joint)], axis=0)
        return np.where(bytes_ > 0, np.minimum(most, FAR), 0.0)

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

    def _step_s(self, edges: Sequence[tuple[str, str]], bytes_: FloatArray) -> FloatArray:
        figures = set(self._routes.step_figures(edges))
        return np.asarray(np.max([latency + bytes_ / width for latency, width in figures], axis=0))

    def alone(self, k: int) -> tuple[float, float, float]:
        """Return least latency and seconds a byte of a device, and those both ways if in turns.

        Args:
            k: its class.
        """
        latency_s, s_per_byte = self.latency_s[k].min(), self.s_per_byte[k].min()
        return float(latency_s), float(s_per_byte), float(self._turns_s_per_byte[k])

    def joining(self, kept: Sequence[int], count: int) -> tuple[float, float]:
        """Return least latency and seconds a byte of the worst link among so many devices.

        Args:
            kept: classes with a device among them.
            count: of devices, of any class.
        """
        return self._joining(kept, range(len(self.sizes)), self.sizes, count)

    def _joining(
        self, kept: Sequence[int], among: Sequence[int], most: IntArray, count: int
    ) -> tuple[float, float]:
        """Return the same where all devices are of some classes, and so many of each at most."""
        growth = self._growth(tuple(among))
        has_all = (growth.devices[:, list(kept)] > 0).all(axis=1)
        enough = np.minimum(growth.devices, most).sum(axis=1) >= count
        row = np.flatnonzero(has_all & enough)[:1]
        if not len(row):
            return FAR, FAR
        return float(growth.latency_s[row[0]]), float(growth.s_per_byte[row[0]])

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

    def _growth_of(self, among: tuple[int, ...]) -> Growth:
        """Return how sets of devices of some classes grow."""
        class_of = {name: k for k in among for name in self._classes[k]}
        edges = sorted(self._edges(list(class_of)))
        least_s = np.minimum.accumulate([latency_s for _, latency_s, _ in edges][::-1])[::-1]
        sets, held = UnionFind(class_of), {name: np.zeros_like(self.sizes) for name in class_of}
        for name, k in class_of.items():
            held[name][k] = 1
        rows = []
        for (inverse, _, ends), latency_s in zip(edges, least_s, strict=True):
            first, second = (sets[end] for end in ends)
            if first != second:
                sets.union(first, second)
                held[sets[first]] = held[first] + held[second]
                rows.append((inverse, latency_s, held[sets[first]]))
        inverses, latencies, devices = zip(*rows, strict=True) if rows else ((), (), ())
        shape = (len(rows), len(self.sizes))
        return Growth(np.array(inverses), np.array(latencies), np.array(devices).reshape(shape))

    def _edges(self, devices: Sequence[str]) -> Iterator[tuple[float, float, tuple[str, str]]]:
        """Yield seconds a byte and latency between pairs that are joined."""
        for ends in combinations(devices, 2):
            with suppress(PipeplanError):  # No path: they are joined by others, if at all.
                path = self._routes.path(*ends)
                yield 1 / path.bytes_per_s, path.latency_s, ends


def _held(vector: IntArray | BoolArray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(vector).tolist())


def reduced_s(
    count: IntArray | int,
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
