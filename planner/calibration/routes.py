"""Routes with every link that they use, shared ones included."""

from planner.artifacts.cluster import Cluster
from planner.artifacts.routing import Route
from planner.calibration.transfers import Ends


def without_sharing(cluster: Cluster) -> Cluster:
    """The same routes, with shared links among the links that they list."""
    links = tuple(link.model_copy(update={"shared": False}) for link in cluster.links)
    return cluster.model_copy(update={"links": links})


def route_of(cluster: Cluster, ends: Ends) -> Route:
    """The route between two devices of a replayed plan that exchange data."""
    route = cluster.route(*ends)
    assert route is not None  # Replayed before: all devices that exchange data are joined.
    return route
