"""Seconds of all-reduces in any topology."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.cluster.cluster import Cluster
from planner.cluster.collective_algorithms import all_reduce_algorithms, ring_half

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
