"""All-reduces: their seconds in any topology, and the buckets of gradients that they reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.cluster.collective_algorithms import Algorithm, all_reduce_algorithms, ring_half
from planner.model.graph_record import Layer

EQUAL = 1e-9
"""Share of a time by which two that are the same may differ by rounding."""


def all_reduce_s(cluster: Cluster, devices: Sequence[str], bytes_: int) -> float:
    """Return the time of the faster of ring and binary tree (:func:`all_reduce_algorithms`).

    Messages of one step that use the same link share its bandwidth.

    Returns:
        Seconds; infinity if two of the devices have no path.
    """
    if len(devices) < 2 or bytes_ == 0:
        return 0.0
    return min(
        steps * _step_s(cluster, edges, step_bytes)
        for steps, step_bytes, edges in all_reduce_algorithms(devices, bytes_)
    )


def ring_half_s(cluster: Cluster, devices: Sequence[str], bytes_: int) -> float:
    """Return the time of a reduce-scatter or an all-gather (:func:`ring_half`).

    Both together take as long as an all-reduce by a ring, so no less than :func:`all_reduce_s`.

    Returns:
        Seconds; infinity if two of the devices have no path.
    """
    if len(devices) < 2 or bytes_ == 0:
        return 0.0
    steps, step_bytes, edges = ring_half(devices, bytes_)
    return steps * _step_s(cluster, edges, step_bytes)


class CollectiveLoad(NamedTuple):
    """What a collective asks of links.

    Attributes:
        latency_s: of its seconds, those that are no bytes' on the edge that is slowest in that.
        gb_per_s: that every edge carries then.
        links: that the edges cross, each as often as they do.
    """

    latency_s: float = 0.0
    gb_per_s: float = math.inf
    links: tuple[tuple[int, int], ...] = ()


def collective_load(cluster: Cluster, devices: Sequence[str], bytes_: int) -> CollectiveLoad:
    """Return what :func:`all_reduce_s` asks of links; of two equally fast ways the ring."""
    ways = all_reduce_algorithms(devices, bytes_)
    ring_s, tree_s = (way.steps * _step_s(cluster, way.edges, way.bytes_) for way in ways)
    is_ring = ring_s <= tree_s * (1 + EQUAL)
    return _load(cluster, ways[0], ring_s) if is_ring else _load(cluster, ways[1], tree_s)


def ring_half_load(cluster: Cluster, devices: Sequence[str], bytes_: int) -> CollectiveLoad:
    """Return what :func:`ring_half_s` asks of links."""
    way = ring_half(devices, bytes_)
    return _load(cluster, way, way.steps * _step_s(cluster, way.edges, way.bytes_))


def _load(cluster: Cluster, chosen: Algorithm, seconds: float) -> CollectiveLoad:
    messages = cluster.at_once(tuple(chosen.edges))
    if messages is None:
        return CollectiveLoad()
    narrowest = min(width for _, width in messages)
    moving_s = chosen.steps * chosen.bytes_ / (narrowest * 1e9)
    routes = (cluster.route(*edge) for edge in chosen.edges)
    links = tuple(link for route in routes if route is not None for link in route.links)
    return CollectiveLoad(max(0.0, seconds - moving_s), narrowest, links)


def fastest_all_reduce_s(cluster: Cluster, devices: Sequence[str], bytes_: int) -> float:
    """Return a lower bound of :func:`all_reduce_s` for these devices in any order.

    Every device exchanges at least 2(r-1)/r of the bytes in :func:`fewest_steps` steps or more;
    :meth:`LinkTable.reduction` gives the best links.
    """
    count = len(devices)
    return _fastest_s(cluster, devices, bytes_, fewest_steps(count), 2)


def fastest_ring_half_s(cluster: Cluster, devices: Sequence[str], bytes_: int) -> float:
    """Return a lower bound of :func:`ring_half_s` for these devices in any order."""
    return _fastest_s(cluster, devices, bytes_, len(devices) - 1, 1)


def _fastest_s(
    cluster: Cluster, devices: Sequence[str], bytes_: int, steps: int, halves: int
) -> float:
    """Return the least seconds of steps in which every device sends (r-1)/r a half of a ring."""
    count = len(devices)
    if count < 2 or bytes_ == 0:
        return 0.0
    moved = halves * (count - 1) / count * bytes_
    numbers = [cluster.numbers[name] for name in devices]
    return max(
        steps * step.latency_s + moved * step.s_per_byte
        for step in cluster.link_table.reduction(numbers)
    )


def fewest_steps(count: int) -> int:
    """Return the consecutive steps of the better of ring and tree for a number of devices."""
    if count < 2:
        return 0
    return min(2 * (count - 1), 2 * math.ceil(math.log2(count)))


def _step_s(cluster: Cluster, edges: list[tuple[str, str]], bytes_: float) -> float:
    messages = cluster.at_once(tuple(edges))
    if messages is None:
        return math.inf
    return max(latency_s + bytes_ / (width * 1e9) for latency_s, width in messages)


# --- buckets of gradients -------------------------------------------------------------------------


class ReducedBytes(NamedTuple):
    """Bytes of parameters that several devices hold.

    Attributes:
        bytes: of their gradients, which are reduced.
        gathered: of the parameters, if they are gathered after the optimizer's step; else 0.
    """

    bytes: int
    gathered: int

    @classmethod
    def sum(cls, rows: Iterable[ReducedBytes]) -> ReducedBytes:
        """Return the bytes of several together."""
        found = list(rows)
        return cls(sum(row.bytes for row in found), sum(row.gathered for row in found))


class GradientBucket(NamedTuple):
    """Gradients of neighbouring layers that are reduced at once.

    Attributes:
        size: of their parameters.
        first_layer: the earliest of the layers, by its number in the stage; the bucket is ready
            when a backward has run it.
    """

    size: ReducedBytes
    first_layer: int


def gradient_buckets(
    layers: Sequence[Layer], sizes: Mapping[str, ReducedBytes], limit_bytes: float
) -> list[GradientBucket]:
    """Return the buckets of some parameters in the order in which a backward fills them.

    A parameter has the place of the first layer that uses it. A bucket is closed before the
    gradient that would make it larger than the limit, so only one of a single gradient may be.

    Args:
        layers: of the stage, in the order of the layer graph.
        sizes: of those whose gradients are reduced for the stage by itself, by name.
        limit_bytes: size of a bucket's gradients.
    """
    buckets: list[GradientBucket] = []
    for size, place in _filled_in_order(layers, sizes):
        if buckets and buckets[-1].size.bytes + size.bytes <= limit_bytes:
            size = ReducedBytes.sum([buckets.pop().size, size])
        buckets.append(GradientBucket(size, place))
    return buckets


def _filled_in_order(
    layers: Sequence[Layer], sizes: Mapping[str, ReducedBytes]
) -> Iterator[tuple[ReducedBytes, int]]:
    """Yield size and place of each gradient, the last of the forward first."""
    places: dict[str, int] = {}
    for place, layer in enumerate(layers):
        for name in layer.parameters:
            if name in sizes and sizes[name].bytes:
                places.setdefault(name, place)
    for name in reversed(places):
        yield sizes[name], places[name]
