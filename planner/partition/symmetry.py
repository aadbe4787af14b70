"""Devices that can be exchanged without changing anything."""

from planner.artifacts.cluster import Cluster


def interchangeable_devices(cluster: Cluster) -> list[list[str]]:
    """Groups of two or more devices of one type with equal routes to every other device.

    Two devices are exchangeable if swapping them maps every route to one of the same bandwidth
    and latency; this is an equivalence, so groups are found by comparing with one member.
    """
    groups: list[list[str]] = []
    for device in cluster.device_names:
        home = next((group for group in groups if _may_swap(cluster, group[0], device)), None)
        if home is None:
            groups.append([device])
        else:
            home.append(device)
    return [group for group in groups if len(group) > 1]


def _may_swap(cluster: Cluster, first: str, second: str) -> bool:
    if cluster.type_of(first) != cluster.type_of(second):
        return False
    return all(
        _width(cluster, first, other) == _width(cluster, second, other)
        and _width(cluster, other, first) == _width(cluster, other, second)
        for other in cluster.device_names
        if other not in (first, second)
    )


def _width(cluster: Cluster, source: str, target: str) -> tuple[float, float, bool] | None:
    route = cluster.route(source, target)
    if route is None:
        return None
    return route.bandwidth_gb_per_s, route.latency_s, bool(route.links)
