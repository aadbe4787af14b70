"""Orders of the devices in which neighbours are well connected, for dynamic programs over them."""

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from planner.artifacts.cluster import Cluster

MAX_DEVICES_FOR_MINIMUM_CUT = 64
"""Recursive minimum cuts take cubic time; larger clusters keep the file's order."""


def device_orders(cluster: Cluster, seconds_by_type: dict[str, float]) -> list[tuple[str, ...]]:
    """Distinct orders worth trying: the file's, by minimum cuts, by widest links, by speed."""
    orders = [cluster.device_names]
    if 2 < len(cluster.devices) <= MAX_DEVICES_FOR_MINIMUM_CUT:
        orders.append(recursive_minimum_cut(cluster))
        orders.append(widest_chain(cluster))
    by_speed = sorted(cluster.device_names, key=lambda d: seconds_by_type[cluster.type_of(d)])
    orders.append(tuple(by_speed))
    orders += [tuple(reversed(order)) for order in orders]
    return list(dict.fromkeys(orders))


def recursive_minimum_cut(cluster: Cluster) -> tuple[str, ...]:
    """SPP's recursive device ordering (Luo et al., INFOCOM 2022, section IV-A).

    Cut the bandwidth graph where it is narrowest (Stoer-Wagner), order both sides the same way
    and join them: devices with wide links end up side by side.
    """
    return minimum_cut_order(cluster, cluster.device_names)


def minimum_cut_order(cluster: Cluster, names: Sequence[str]) -> tuple[str, ...]:
    """The same for some of the devices."""
    return tuple(_order(_bandwidth_graph(cluster, names)))


def _bandwidth_graph(cluster: Cluster, names: Sequence[str]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_nodes_from(names)
    for position, source in enumerate(names):
        for target in names[position + 1 :]:
            route = cluster.route(source, target)
            if route is not None:
                graph.add_edge(source, target, weight=route.bandwidth_gb_per_s)
    return graph


def _order(graph: nx.Graph) -> list[str]:
    if len(graph) <= 2:
        return list(graph)
    if not nx.is_connected(graph):
        sides = [set(part) for part in nx.connected_components(graph)]
    else:
        sides = [set(side) for side in nx.stoer_wagner(graph)[1]]
    rank = {device: index for index, device in enumerate(graph)}
    sides.sort(key=lambda side: min(rank[device] for device in side))
    ordered: list[str] = []
    for side in sides:
        ordered += _order(graph.subgraph(sorted(side, key=rank.__getitem__)).copy())
    return ordered


def widest_chain(cluster: Cluster) -> tuple[str, ...]:
    """From each device go on to the unused one with the widest link; keep the best start."""
    chains = [_chain_from(cluster, start) for start in cluster.device_names]
    return max(chains, key=lambda chain: sorted(_bandwidths(cluster, chain)))


def _chain_from(cluster: Cluster, start: str) -> tuple[str, ...]:
    chain, left = [start], [d for d in cluster.device_names if d != start]
    while left:
        chain.append(max(left, key=lambda device: _bandwidth(cluster, chain[-1], device)))
        left.remove(chain[-1])
    return tuple(chain)


def _bandwidths(cluster: Cluster, chain: tuple[str, ...]) -> list[float]:
    return [_bandwidth(cluster, u, v) for u, v in pairwise(chain)]


def _bandwidth(cluster: Cluster, source: str, target: str) -> float:
    route = cluster.route(source, target)
    return 0.0 if route is None else route.bandwidth_gb_per_s
