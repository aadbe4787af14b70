"""Least figures of messages and all-reduces of any devices of a cluster, wherever they are."""

from __future__ import annotations

import numpy as np
from networkx.utils import UnionFind

from planner.cluster.cluster import Cluster
from planner.verification.proof.layers import FloatArray, IntArray
from planner.verification.proof.links import FAR, reduced_s


class AnyDevices:
    """The best links of a cluster.

    Args:
        cluster: of all devices.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._latency_s = _least_latency_s(cluster)
        self._joint, narrow_s = _any_joined(cluster)
        self._joint_latency_s = np.maximum(self._latency_s, narrow_s)

    def message_s(self, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of a message; 0 where nothing is sent."""
        widest = self._joint[2] if len(self._joint) > 2 else FAR
        seconds = self._latency_s + bytes_ * widest
        return np.where(bytes_ > 0, np.minimum(seconds, FAR), 0.0)

    def all_reduce_s(self, replicas: IntArray, bytes_: FloatArray) -> FloatArray:
        """Return the least seconds of an all-reduce over so many devices at least."""
        total = len(self._joint) - 1
        count = np.clip(replicas, 2, max(total, 2))
        place = np.minimum(count, total)
        seconds = reduced_s(count, bytes_, self._joint_latency_s[place], self._joint[place])
        seconds = np.where((bytes_ > 0) & (replicas > 1), np.minimum(seconds, FAR), 0.0)
        return np.where((replicas > total) & (bytes_ > 0), FAR, seconds)


def _any_joined(cluster: Cluster) -> tuple[FloatArray, FloatArray]:
    """Return seconds a byte and least latency of the worst link that joining so many devices needs.

    Sets of devices and switches grow by the widest links first (Kruskal 1956): devices in different
    sets are not joined by wider links, by whatever switches or other devices.
    """
    slowest, latency_s = np.full((2, len(cluster.devices) + 1), FAR)
    slowest[:2] = latency_s[:2] = 0.0
    sets = UnionFind([*cluster.device_names, *cluster.switches])
    count = dict.fromkeys(cluster.switches, 0) | dict.fromkeys(cluster.device_names, 1)
    largest = 1
    links = sorted(cluster.links, key=lambda link: -link.bandwidth_gb_per_s)
    least_us = np.minimum.accumulate([link.latency_us for link in links][::-1])[::-1]
    for link, least in zip(links, least_us, strict=True):
        first, second = (sets[end] for end in link.between)
        if first == second:
            continue
        sets.union(first, second)
        joined = count[first] + count[second]
        count[sets[first]] = joined
        slowest[largest + 1 : joined + 1] = 1 / (link.bandwidth_gb_per_s * 1e9)
        latency_s[largest + 1 : joined + 1] = least * 1e-6
        largest = max(largest, joined)
    return slowest, latency_s


def _least_latency_s(cluster: Cluster) -> float:
    """Return the least latency: of a link between two devices, or of the links at two of them."""
    switches = set(cluster.switches)
    direct: list[float] = []
    attached: dict[str, float] = {}
    for link in cluster.links:
        inner = switches.intersection(link.between)
        if not inner:
            direct.append(link.latency_us)
        for end in set(link.between) - switches if inner else ():
            attached[end] = min(link.latency_us, attached.get(end, link.latency_us))
    ends = sorted(attached.values())[:2]
    if len(ends) == 2:
        direct.append(sum(ends))
    return min(direct, default=0.0) * 1e-6
