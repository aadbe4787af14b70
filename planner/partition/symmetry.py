"""Devices that can be exchanged without changing anything."""

from itertools import permutations

from planner.artifacts.cluster import Cluster, Route

Resource = tuple[int, int]


def interchangeable_devices(cluster: Cluster) -> list[list[str]]:
    """Groups of two or more devices of one type whose exchange changes no time of any plan.

    Being exchangeable is an equivalence, so groups are found by comparing with one member.
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
    """Whether exchanging two devices maps every route to one of equal figures.

    Transfers wait for each other where their routes share a link, so the links along the routes
    must correspond one to one as well: devices behind different switches may look alike to each
    single transfer, but not to several at once.
    """
    if cluster.type_of(first) != cluster.type_of(second):
        return False
    swapped = {first: second, second: first}
    image: dict[Resource, Resource] = {}
    for source, target in permutations(cluster.device_names, 2):
        route = cluster.route(source, target)
        other = cluster.route(swapped.get(source, source), swapped.get(target, target))
        if _figures(route) != _figures(other):
            return False
        if route is None or other is None:
            continue
        for link, its_image in zip(route.links, other.links, strict=True):
            if image.setdefault(link, its_image) != its_image:
                return False
    return len(set(image.values())) == len(image)


def _figures(route: Route | None) -> tuple[float, float, int] | None:
    if route is None:
        return None
    return route.bandwidth_gb_per_s, route.latency_s, len(route.links)
