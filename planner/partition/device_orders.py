"""Orders of the devices in which neighbours are well connected, for dynamic programs over them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx

from planner.artifacts.cluster import Cluster

MAX_DEVICES_FOR_MINIMUM_CUT = 64
"""Recursive minimum cuts take cubic time; larger clusters keep the file's order."""


def device_orders(cluster: Cluster, seconds_by_type: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Distinct orders worth trying: the file's, by minimum cuts, by widest links, by speed.

    Each is worked out when it is asked for: that takes seconds for some clusters.
    """
    found: list[tuple[str, ...]] = []
    for order in _orders(cluster, seconds_by_type):
        if order not in found:
            found.append(order)
            yield order
    backwards = (order[::-1] for order in list(found))
    yield from (order for order in backwards if order not in found)


def _orders(cluster: Cluster, seconds_by_type: dict[str, float]) -> Iterator[tuple[str, ...]]:
    yield cluster.device_names
    if 2 < len(cluster.devices) <= MAX_DEVICES_FOR_MINIMUM_CUT:
        yield recursive_minimum_cut(cluster)
        yield widest_chain(cluster)
    yield tuple(sorted(cluster.device_names, key=lambda d: seconds_by_type[cluster.type_of(d)]))


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
    names = cluster.device_names
    widths = {u: {v: _bandwidth(cluster, u, v) for v in names if v != u} for u in names}
    chains = [_chain_from(widths, start) for start in names]
    return max(chains, key=lambda chain: sorted(widths[u][v] for u, v in pairwise(chain)))


def _chain_from(widths: dict[str, dict[str, float]], start: str) -> tuple[str, ...]:
    chain, left = [start], [device for device in widths if device != start]
    while left:
        chain.append(max(left, key=widths[chain[-1]].__getitem__))
        left.remove(chain[-1])
    return tuple(chain)


def _bandwidth(cluster: Cluster, source: str, target: str) -> float:
    route = cluster.route(source, target)
    return 0.0 if route is None else route.bandwidth_gb_per_s
