"""Devices that can be exchanged without changing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from planner.cluster.cluster import Cluster
from planner.cluster.routing import Route
from planner.search.partition.chain import Partition

Resource = tuple[int, int]
MOST_DEVICES = 64
"""On larger clusters comparing all routes takes longer than it saves."""


class Interchange:
    """Partitions that differ by interchangeable devices alone are one.

    Args:
        cluster: the devices; with more than MOST_DEVICES each is taken as different.

    Attributes:
        group_of: all devices that may be exchanged with a device, itself included, in the cluster's
            order; those with none but themselves are left out.
    """

    def __init__(self, cluster: Cluster) -> None:
        small = len(cluster.devices) <= MOST_DEVICES
        groups = interchangeable_devices(cluster) if small else []
        self._number = cluster.numbers
        self.group_of = {device: tuple(group) for group in groups for device in group}

    def representative(self, partition: Partition) -> Partition:
        """Return the partition on the first devices of each group, in the order of the stages."""
        if not self.group_of:
            return partition
        stands_for: dict[str, str] = {}
        taken: dict[tuple[str, ...], int] = {}
        stages = []
        for stage in partition:
            for device in stage.devices:
                if device not in stands_for:
                    group = self.group_of.get(device, (device,))
                    stands_for[device] = group[taken.get(group, 0)]
                    taken[group] = taken.get(group, 0) + 1
            devices = sorted((stands_for[d] for d in stage.devices), key=self._number.__getitem__)
            stages.append(replace(stage, devices=tuple(devices)))
        return tuple(stages)


def interchangeable_devices(cluster: Cluster) -> list[list[str]]:
    """Return groups of two or more devices of one type whose exchange changes no time of any plan.

    Being exchangeable is an equivalence, so groups are found by comparing with one member.
    """
    exchanges = _Exchanges(cluster)
    groups: list[list[str]] = []
    for device in cluster.device_names:
        found = next((group for group in groups if exchanges.may_swap(group[0], device)), None)
        if found is None:
            groups.append([device])
        else:
            found.append(device)
    return [group for group in groups if len(group) > 1]


class _Exchanges:
    """Which two devices may be exchanged; routes between all others stay as they are."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._uses = Counter(
            link for ends in permutations(cluster.device_names, 2) for link in self._links(*ends)
        )

    def may_swap(self, first: str, second: str) -> bool:
        """Return whether exchanging two devices maps every route to one of equal figures.

        Both are on one host, or on none: on another they would be slowed by other devices.

        Transfers wait for each other where their routes share a link, so the links along the
        routes must correspond one to one as well: devices behind different switches may look alike
        to each single transfer, but not to several at once.
        """
        if self._cluster.type_of(first) != self._cluster.type_of(second):
            return False
        host_of = self._cluster.host_of
        if host_of.get(first) != host_of.get(second):
            return False
        image: dict[Resource, Resource] = {}
        uses: Counter[Resource] = Counter()
        for route, other in self._pairs(first, second):
            if _figures(route) != _figures(other):
                return False
            if route is None or other is None:
                continue
            uses.update(route.links)
            for link, its_image in zip(route.links, other.links, strict=True):
                if image.setdefault(link, its_image) != its_image:
                    return False
        one_to_one = len(set(image.values())) == len(image)
        stays = all(image[link] == link for link, n in uses.items() if n < self._uses[link])
        return one_to_one and stays

    def _pairs(self, first: str, second: str) -> Iterator[tuple[Route | None, Route | None]]:
        """Yield every route from or to one of the two, and the one that takes its place."""
        route = self._cluster.route
        for here, there in ((first, second), (second, first)):
            for other in self._cluster.device_names:
                if other not in (first, second):
                    yield route(here, other), route(there, other)
                    yield route(other, here), route(other, there)
            yield route(here, there), route(there, here)

    def _links(self, source: str, target: str) -> tuple[Resource, ...]:
        route = self._cluster.route(source, target)
        return () if route is None else route.links


def _figures(route: Route | None) -> tuple[float, float, int] | None:
    if route is None:
        return None
    return route.bandwidth_gb_per_s, route.latency_s, len(route.links)
