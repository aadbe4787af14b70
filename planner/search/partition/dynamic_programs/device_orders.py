"""Orders of the devices for dynamic programs, and the units in which large clusters are handed out.

In a good order neighbours are well connected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx

from planner.cluster.cluster import Cluster
from planner.search.partition.chain import Chain
from planner.search.partition.dynamic_programs.order_program import Order, Unit

MAX_DEVICES_FOR_MINIMUM_CUT = 64
"""Recursive minimum cuts take cubic time; larger clusters keep the file's order."""


def device_orders(cluster: Cluster, seconds_by_type: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Yield distinct orders: the file's, by minimum cuts, by widest links, by speed.

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
    """Return SPP's recursive device ordering (Luo et al., INFOCOM 2022, section IV-A).

    Cut the bandwidth graph where it is narrowest (Stoer-Wagner), order both sides the same way
    and join them: devices with wide links end up side by side.
    """
    return minimum_cut_order(cluster, cluster.device_names)


def minimum_cut_order(cluster: Cluster, names: Sequence[str]) -> tuple[str, ...]:
    """Return the order of some of the devices by recursive minimum cuts."""
    return tuple(names[number] for number in _order(_bandwidth_graph(cluster, names)))


def _bandwidth_graph(cluster: Cluster, names: Sequence[str]) -> nx.Graph:
    """Return the graph of the devices' numbers: sets of strings would differ from run to run."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(names)))
    for first, source in enumerate(names):
        for second in range(first + 1, len(names)):
            route = cluster.route(source, names[second])
            if route is not None:
                graph.add_edge(first, second, weight=route.bandwidth_gb_per_s)
    return graph


def _order(graph: nx.Graph) -> list[int]:
    if len(graph) <= 2:
        return list(graph)
    if not nx.is_connected(graph):
        sides = [set(part) for part in nx.connected_components(graph)]
    else:
        sides = [set(side) for side in nx.stoer_wagner(graph)[1]]
    rank = {number: index for index, number in enumerate(graph)}
    sides.sort(key=lambda side: min(rank[number] for number in side))
    ordered: list[int] = []
    for side in sides:
        ordered += _order(graph.subgraph(sorted(side, key=rank.__getitem__)).copy())
    return ordered


def widest_chain(cluster: Cluster) -> tuple[str, ...]:
    """Go on from each device to the unused one with the widest link; keep the best start."""
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


MAX_UNITS = 128
"""Programs over more take too long; then neighbours in a group stay together."""
MAX_REPLICA_CHOICES = 16
"""Beyond this many units only some numbers of replicas are tried."""


def first_orders(chain: Chain) -> Iterator[Order]:
    """Yield distinct orders worth trying, in units, each worked out when asked for."""
    cluster = chain.problem.cluster
    size = unit_size(chain)
    found: dict[Order, None] = {}
    for names in device_orders(cluster, chain.model_s):
        order = _units(chain, [cluster.numbers[name] for name in names], size)
        if order not in found:
            found[order] = None
            yield order
    last = interleaved(chain, next(iter(found)))
    if last not in found:
        yield last


def interleaved(chain: Chain, order: Order) -> Order:
    """Return the types spread evenly, so that stages with replicas have some of each.

    A microbatch's way through such stages is that of their fastest replicas.
    """
    cluster = chain.problem.cluster
    by_type: dict[str, list[Unit]] = {}
    for unit in order:
        by_type.setdefault(cluster.type_of(cluster.device_names[unit[0]]), []).append(unit)
    places = [
        ((number + 0.5) / len(units), unit)
        for units in by_type.values()
        for number, unit in enumerate(units)
    ]
    return tuple(unit for _, unit in sorted(places))


def unit_size(chain: Chain) -> int:
    """Return devices in a unit: 1 for up to MAX_UNITS devices."""
    count = len(chain.problem.cluster.devices)
    return -(-count // MAX_UNITS) if chain.problem.job.replication else 1


def _units(chain: Chain, numbers: list[int], size: int) -> Order:
    """Return runs of up to ``size`` devices of one group and type."""
    if size == 1:
        return tuple((number,) for number in numbers)
    cluster = chain.problem.cluster
    groups = cluster.link_table.groups
    units: list[Unit] = []
    last: object = None
    for number in numbers:
        kind = cluster.type_of(cluster.device_names[number])
        place = (kind, None if groups is None else int(groups.of[number]))
        if units and place == last and len(units[-1]) < size:
            units[-1] = (*units[-1], number)
        else:
            units.append((number,))
        last = place
    return tuple(units)


def replica_choices(chain: Chain) -> list[int]:
    """Return numbers of units a stage may take."""
    if not chain.problem.job.replication:
        return [1]
    size = unit_size(chain)
    count = -(-len(chain.problem.cluster.devices) // size)
    microbatches = chain.problem.job.microbatches
    useful = [r for r in range(1, count + 1) if _is_useful(r * size, microbatches, size)]
    return useful if count <= MAX_REPLICA_CHOICES else _spaced(useful)


def unit_counts(count: int) -> list[int]:
    """Return numbers of units that a stage may take of so many."""
    counts = range(1, count + 1)
    return list(counts) if count <= MAX_REPLICA_CHOICES else _spaced(counts)


def _spaced(useful: Sequence[int]) -> list[int]:
    """Return choices in steps of a quarter: 1, 2, 3, 4, 5, 6, 8, 10, 12, 15 and so on."""
    kept = [1]
    for choice in useful:
        if choice >= min(kept[-1] + 1, kept[-1] * 5 // 4 + 1) and choice > kept[-1]:
            kept.append(choice)
    return kept


def _is_useful(replicas: int, microbatches: int, size: int) -> bool:
    """Return whether one unit less would have the most loaded replica run more microbatches."""
    if replicas <= size:
        return True
    return -(-microbatches // replicas) < -(-microbatches // (replicas - size))
