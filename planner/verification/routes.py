"""Paths of messages through a cluster, and the time of a message and of an all-reduce."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError

Edge = tuple[str, str]
"""Two devices of which the first sends something to the other."""
Lane = tuple[int, str]
"""What one message holds at a time: a link, and the vertex it is entered at, "" of half duplex."""
_Way = tuple[tuple[str, ...], tuple[int, ...]]
"""The vertices and the links of a path, in order."""

_NO_PATH = "stages: two devices that must exchange data have no path of links"


class Path(NamedTuple):
    """A path from one device to another.

    Attributes:
        lanes: that a message holds; a shared link has none.
        latency_s: the sum over the links.
        bytes_per_s: of the narrowest link.
    """

    lanes: tuple[Lane, ...]
    latency_s: float
    bytes_per_s: float

    def seconds(self, bytes_: float) -> float:
        """Time of a message that has the path to itself."""
        return self.latency_s + bytes_ / self.bytes_per_s


class AllReduce(NamedTuple):
    """What an all-reduce takes.

    Attributes:
        seconds: alone.
        latency_s: of these, without bytes.
        bytes_per_s: of each edge of its ring or tree.
        crossings: how many of the edges hold each lane.
    """

    seconds: float
    latency_s: float
    bytes_per_s: float
    crossings: Counter[Lane]


class Routes:
    """The paths of a cluster, through switches alone: devices do not forward.

    Args:
        cluster: whose links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._links, self._switches = cluster.links, set(cluster.switches)
        self._at: defaultdict[str, list[int]] = defaultdict(list)
        for number, link in enumerate(cluster.links):
            for end in link.between:
                self._at[end].append(number)
        self._found: dict[Hashable, _Way] = {}
        self.path = cache(self._path)
        self.attachment = cache(self._attachment)
        self._widths = sorted({k.bandwidth_gb_per_s for k in cluster.links}, reverse=True)
        self._quickest = cache(self._find_quickest)
        self._alike: dict[Hashable, str] = {}

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(self, devices: Sequence[str], bytes_: int) -> AllReduce:
        """The better of a ring and a binary tree over the devices in this order.

        Raises:
            PipeplanError: if each of them has an edge without a path.
        """
        count = len(devices)
        ring, tree = ring_and_tree(devices)
        ways = [
            (2 * (count - 1), ring, bytes_ / count),
            (2 * math.ceil(math.log2(count)), tree, bytes_),
        ]
        joined = [way for way in ways if all(self._has_path(*edge) for edge in way[1])]
        if not joined:
            raise PipeplanError(_NO_PATH)
        # Of two that are equal but for rounding it is the ring.
        best, *other = (self._in_steps(*way) for way in joined)
        return other[0] if other and best.seconds > other[0].seconds * (1 + 1e-9) else best

    def ring_half(self, devices: Sequence[str], bytes_: int) -> AllReduce:
        """A reduce-scatter or an all-gather: once around a ring of the devices in this order."""
        ring, _ = ring_and_tree(devices)
        return self._in_steps(len(devices) - 1, ring, bytes_ / len(devices))

    def _in_steps(self, steps: int, edges: Sequence[Edge], bytes_: float) -> AllReduce:
        """Simultaneous messages that share links, in equal steps; the slowest counts."""
        rows = self.step_figures(edges)
        seconds = steps * max(latency_s + bytes_ / width for latency_s, width in rows)
        width = min(width for _, width in rows)
        crossings = Counter(lane for edge in edges for lane in self.path(*edge).lanes)
        return AllReduce(seconds, max(0.0, seconds - steps * bytes_ / width), width, crossings)

    def step_figures(self, edges: Sequence[Edge]) -> list[tuple[float, float]]:
        """Return latency and bytes a second of simultaneous messages that share links."""
        paths = [self.path(*edge) for edge in edges]
        crossing = Counter(lane for path in paths for lane in path.lanes)
        share = {
            lane: self._links[lane[0]].bandwidth_gb_per_s * 1e9 / count
            for lane, count in crossing.items()
        }
        return [
            (path.latency_s, min([path.bytes_per_s, *(share[lane] for lane in path.lanes)]))
            for path in paths
        ]

    # --- paths ------------------------------------------------------------------------------------

    def require_path(self, source: str, target: str) -> None:
        """Refuse two devices that no path joins.

        Raises:
            PipeplanError: if none does.
        """
        if not self._has_path(source, target):
            raise PipeplanError(_NO_PATH)

    def _has_path(self, source: str, target: str) -> bool:
        return source == target or target in self._quickest(self._like(source, target), 0.0)

    def _like(self, source: str, target: str) -> str:
        """Return the first device that is attached like a source, unless that is the target."""
        first = self._alike.setdefault(self.attachment(source), source)
        return source if first == target else first

    def _attachment(self, device: str) -> Hashable:
        """Equal for devices whose only links are to the same switch and of the same figures."""
        if len(self._at[device]) != 1:
            return device
        link = self._links[self._at[device][0]]
        (switch,) = {*link.between} - {device}
        if switch not in self._switches:
            return device
        return switch, *link.model_dump(exclude={"between"}).values()

    def _path(self, source: str, target: str) -> Path:
        """The widest, then the quickest, then that of the fewest links, then the first by names.

        Raises:
            PipeplanError: if there is none.
        """
        if source == target:
            return Path((), 0.0, math.inf)
        attached = self.attachment(source), self.attachment(target)
        if attached not in self._found:
            self.require_path(source, target)
            ways = partial(self._quickest, self._like(source, target))
            widest = bisect_left(self._widths, True, key=lambda width: target in ways(width))
            self._found[attached] = ways(self._widths[widest])[target]
        names, numbers = self._found[attached]
        # The same path serves all that are attached alike, but for its ends.
        names, first, last = (source, *names[1:-1], target), self._at[source], self._at[target]
        if len(numbers) > 1 and len(first) == 1:
            numbers = (*first, *numbers[1:])
        if len(numbers) > 1 and len(last) == 1:
            numbers = (*numbers[:-1], *last)
        links = [self._links[number] for number in numbers]
        lanes = tuple(
            (number, "" if link.duplex == "half" else name)
            for number, link, name in zip(numbers, links, names, strict=False)
            if not link.shared
        )
        latencies_s = [link.latency_us * 1e-6 for link in links]
        # The order of the sum decides its last bit, and that which of two messages is first.
        if len(links) > 1 and len(first) == len(last) == 1:
            ends_s = (links[0].latency_us + links[-1].latency_us) * 1e-6
            latencies_s = [*latencies_s[1:-1], ends_s]
        return Path(lanes, sum(latencies_s), min(k.bandwidth_gb_per_s for k in links) * 1e9)

    def _find_quickest(self, source: str, width: float) -> dict[str, _Way]:
        """Return the first paths over links that are so wide, by Dijkstra's algorithm."""
        heap: list[tuple[float, int, tuple[str, ...], tuple[tuple[bool, str, str, int], ...]]]
        heap, found = [(0.0, 0, (source,), ())], dict[str, _Way]()
        while heap:
            latency_s, hops, names, ranked = heappop(heap)
            if names[-1] in found:
                continue
            found[names[-1]] = names, tuple(row[-1] for row in ranked)
            may_forward = names[-1] == source or names[-1] in self._switches
            for number in self._at[names[-1]] if may_forward else ():
                link = self._links[number]
                (other,) = {*link.between} - {names[-1]}
                if link.bandwidth_gb_per_s < width or other in found:
                    continue
                # Parallel links of equal figures: one that messages need not share comes first.
                rank = (not link.shared, link.duplex, link.source, number)
                further = (latency_s + link.latency_us * 1e-6, hops + 1, (*names, other))
                heappush(heap, (*further, (*ranked, rank)))
        return found


def ring_and_tree(devices: Sequence[str]) -> tuple[list[Edge], list[Edge]]:
    """Return the edges of the two ways to reduce over devices in this order."""
    ring = [*pairwise(devices), (devices[-1], devices[0])]
    tree = [(devices[(child - 1) // 2], devices[child]) for child in range(1, len(devices))]
    return ring, tree
