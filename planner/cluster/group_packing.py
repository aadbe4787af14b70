"""Packing of a cluster's devices into tensor-parallel groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from planner.cluster.cluster import Cluster, node_of
from planner.cluster.link_table import FloatArray
from planner.cluster.tensor_groups import TensorGroup
from planner.errors import PipeplanError


def packed(
    cluster: Cluster, size: int, among: Collection[str] | None = None
) -> tuple[TensorGroup, ...]:
    """Return disjoint groups of well joined devices of one type, as many as greedy choice finds.

    A group grows by the device with the widest links to all that it has, of these the one of least
    latency. At each step the group whose narrowest link is widest is kept, so that groups lie
    within nodes as far as nodes have room for whole ones. Devices that remain are in no group.

    Args:
        cluster: of single devices.
        size: devices of a group, two or more.
        among: the devices that groups may have; None: all.

    Raises:
        PipeplanError: if no group can be made.
    """
    groups = _Left(cluster, among).groups(size)
    if not groups:
        raise PipeplanError(
            f"tensor_parallel = {size}: the cluster has no {size} devices of one type that are "
            "joined by links; choose fewer"
        )
    return _named(cluster, groups)


def packed_in_turn(
    cluster: Cluster, sizes: Sequence[int], among: Collection[str] | None = None
) -> tuple[TensorGroup, ...]:
    """Return groups of the first size, of what they leave such of the next, and so on.

    Args:
        cluster: of single devices.
        sizes: devices of a group; 1: each by itself.
        among: the devices that groups may have; None: all.

    Returns:
        Perhaps none.
    """
    left = _Left(cluster, among)
    return _named(cluster, [group for size in sizes for group in left.groups(size)])


def alike_nodes(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the devices of all nodes that have as many of the same types, as widely joined."""
    table, number = cluster.link_table, cluster.numbers
    nodes: dict[str, list[str]] = {}
    for name in cluster.device_names:
        nodes.setdefault(node_of(name), []).append(name)
    found: dict[object, list[str]] = {}
    for names in nodes.values():
        rows = [number[name] for name in names]
        widths = table.s_per_byte[np.ix_(rows, rows)][~np.eye(len(rows), dtype=bool)]
        kinds = tuple(sorted(map(cluster.type_of, names)))
        found.setdefault((kinds, tuple(sorted(widths.tolist()))), []).extend(names)
    return [tuple(names) for names in found.values()]


def _named(cluster: Cluster, groups: Sequence[Sequence[int]]) -> tuple[TensorGroup, ...]:
    """Return groups of devices given by their numbers, in the cluster's order."""
    names = cluster.device_names
    members = sorted(sorted(group) for group in groups)
    return tuple(group_named([names[number] for number in group]) for group in members)


class _Left:
    """Devices that are in no group yet."""

    def __init__(self, cluster: Cluster, among: Collection[str] | None = None) -> None:
        table = cluster.link_table
        self._s_per_byte = np.maximum(table.s_per_byte, table.s_per_byte.T)
        self._latency_s = np.maximum(table.latency_s, table.latency_s.T)
        names = cluster.device_names
        kinds = [(cluster.type_of(name), cluster.host_of.get(name)) for name in names]
        number = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
        kind_of = np.array([number[kind] for kind in kinds])
        self._s_per_byte[kind_of[:, None] != kind_of[None, :]] = np.inf
        self._seeds: dict[object, list[int]] = {}
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            self._seeds.setdefault((cluster.attachment(name), kind), []).append(place)
        self._is_free = np.array([among is None or name in among for name in names], dtype=bool)

    def groups(self, size: int) -> list[list[int]]:
        """Take groups out, as many as greedy choice finds, and return them."""
        groups = []
        while (best := self._best(size)) is not None:
            self._is_free[best] = False
            groups.append(best)
        return groups

    def _best(self, size: int) -> list[int] | None:
        """Return the group that is joined best; None if there is none.

        Devices of equal links are tried once.
        """
        found: tuple[float, float, list[int]] | None = None
        for alike in self._seeds.values():
            seed = next((place for place in alike if self._is_free[place]), None)
            grown = None if seed is None else self._grown(seed, size)
            if grown is not None and (found is None or grown < found):
                found = grown
        return None if found is None else found[2]

    def _grown(self, seed: int, size: int) -> tuple[float, float, list[int]] | None:
        """Return the group from a device on, after its least width and its most latency."""
        group = [seed]
        inverse: FloatArray = self._s_per_byte[seed].copy()
        latency: FloatArray = self._latency_s[seed].copy()
        worst = (0.0, 0.0)
        while len(group) < size:
            free = np.flatnonzero(self._is_free & np.isfinite(inverse))
            free = free[~np.isin(free, group)]
            if not len(free):
                return None
            following = int(free[np.lexsort((free, latency[free], inverse[free]))[0]])
            worst = max(worst[0], inverse[following]), max(worst[1], latency[following])
            group.append(following)
            np.maximum(inverse, self._s_per_byte[following], out=inverse)
            np.maximum(latency, self._latency_s[following], out=latency)
        return float(worst[0]), float(worst[1]), group


def group_named(devices: Sequence[str]) -> TensorGroup:
    """Return a group of devices named by the first and the last of them: ``n0/gpu0-3``."""
    if len(devices) == 1:
        return TensorGroup(name=devices[0], devices=tuple(devices))
    first, last = devices[0], devices[-1]
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    while shared and first[shared - 1].isdigit():
        shared -= 1
    return TensorGroup(name=f"{first}-{last[shared:]}", devices=tuple(devices))
