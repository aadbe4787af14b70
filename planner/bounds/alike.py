"""Devices that can be exchanged without changing anything."""

from __future__ import annotations

from collections import Counter

from planner.cluster.cluster import Cluster


def interchangeable_devices(cluster: Cluster) -> list[list[str]]:
    """Return groups of two or more devices whose exchange changes no time of any plan.

    Two devices can be exchanged if they are of one type, on one host or on none, and exchanging
    their names leaves all links as they are. That is an equivalence, so a device is compared with
    one member of each group.
    """
    groups: list[list[str]] = []
    for device in cluster.device_names:
        found = next((group for group in groups if _may_swap(cluster, group[0], device)), None)
        if found is None:
            groups.append([device])
        else:
            found.append(device)
    return [group for group in groups if len(group) > 1]


def _may_swap(cluster: Cluster, first: str, second: str) -> bool:
    kinds, hosts = map(cluster.type_of, (first, second)), map(cluster.host_of.get, (first, second))
    if len(set(kinds)) > 1 or next(hosts) != next(hosts):
        return False
    other = {first: second, second: first}
    links: Counter[object] = Counter()
    for link in cluster.links:
        if first in link.between or second in link.between:
            figures = tuple(sorted(link.model_dump(exclude={"between"}).items()))
            links[frozenset(link.between), figures] += 1
            links[frozenset(other.get(end, end) for end in link.between), figures] -= 1
    return not any(links.values())
