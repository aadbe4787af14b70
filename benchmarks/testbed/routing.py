"""The way of data between two devices, vertex by vertex, exactly as the cluster has it."""

from __future__ import annotations

from dataclasses import dataclass

from planner import Cluster


@dataclass(frozen=True)
class Hop:
    """One step of a route: from a vertex over a link, by its place in the cluster's ``links``."""

    vertex: str
    link: int


def hops(cluster: Cluster, source: str, target: str) -> tuple[Hop, ...] | None:
    """The steps of ``cluster.route(source, target)``; None if there is no path.

    Links must not be shared: these occupy nothing, so that a route does not name them.
    """
    route = cluster.route(source, target)
    if route is None:
        return None
    vertex, steps = source, []
    for link, _ in route.links:
        steps.append(Hop(vertex, link))
        first, second = cluster.links[link].between
        vertex = second if vertex == first else first
    assert vertex == target, f"the route from {source} to {target} ends at {vertex}"
    return tuple(steps)
