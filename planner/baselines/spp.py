"""SPP: order the devices, partition along the order, schedule, for every number of stages.

Luo, Yi, Long, Fan, Wu, Yang and Lin, "Efficient Pipeline Planning for Expedited Distributed DNN
Training", INFOCOM 2022.

RDO orders the devices by recursive minimum cuts; PRM finds, for every number of stages, the
partition, mapping and replication along that order with the least bottleneck (``along``), where a
stage costs M * stage time / r + all-reduce, a channel M * channel time; PE schedules it
(:mod:`planner.schedules.pe`); the number of stages with the smallest makespan wins.

Our reconstruction: 1F1B's stashes are kept within memory; a channel between r and r' replicas is
min(r, r') times as wide as its slowest pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
import numpy as np

from planner.baselines.along import Row
from planner.baselines.layers import Baseline, Layers, Stages, in_file_order, nothing_fits
from planner.baselines.stage_costs import Block, StageCosts, device_blocks
from planner.cluster.cluster import Cluster
from planner.costs.placement import place
from planner.schedules.pe import blocks_of, makespan_s

MAX_DEVICES_FOR_MINIMUM_CUT = 64
"""Recursive minimum cuts take cubic time; more devices keep the file's order."""


def plan(layers: Layers) -> Stages:
    """Return the partition whose execution by PE is shortest, over all numbers of stages.

    Raises:
        InfeasibleError: if no number of stages fits.
    """
    costs = StageCosts(layers, recursive_device_order(layers))
    best, best_s = None, math.inf
    row = Row(costs, np.add)
    for _, stages in row.best():
        found = in_file_order(layers, stages)
        pipeline = place(layers.problem, layers.specs(found))
        time_s = makespan_s(blocks_of(pipeline), pipeline.microbatches)
        if time_s < best_s:
            # PE takes at least as long as the bottleneck.
            best, best_s, row.limit_s = found, time_s, time_s
    if best is None:
        raise nothing_fits("spp", "its partitions along the recursive minimum cuts")
    return best


def recursive_device_order(layers: Layers) -> tuple[Block, ...]:
    """Return the devices ordered by RDO, in blocks of neighbours where there are too many."""
    blocks = device_blocks(layers)
    if not 2 < len(blocks) <= MAX_DEVICES_FOR_MINIMUM_CUT:
        return blocks
    first = [block[0] for block in blocks]
    return tuple(blocks[number] for number in minimum_cut_order(layers.problem.cluster, first))


def minimum_cut_order(cluster: Cluster, names: Sequence[str]) -> list[int]:
    """Return the places of devices in SPP's recursive order (section IV-A).

    Cut the bandwidth graph where it is narrowest (Stoer-Wagner), order both sides the same way and
    join them: devices with wide links end up side by side.
    """
    graph = nx.Graph()
    # Numbers as nodes: sets of strings would differ from run to run.
    graph.add_nodes_from(range(len(names)))
    for first, source in enumerate(names):
        for second in range(first + 1, len(names)):
            route = cluster.route(source, names[second])
            if route is not None:
                graph.add_edge(first, second, weight=route.bandwidth_gb_per_s)
    return _order(graph)


def _order(graph: nx.Graph) -> list[int]:
    if len(graph) <= 2:
        return list(graph)
    is_one = nx.is_connected(graph)
    parts = nx.stoer_wagner(graph)[1] if is_one else nx.connected_components(graph)
    rank = {number: index for index, number in enumerate(graph)}
    sides = sorted((sorted(part, key=rank.__getitem__) for part in parts), key=lambda s: rank[s[0]])
    return [number for side in sides for number in _order(graph.subgraph(side).copy())]


SPP = Baseline("spp", "Luo et al., INFOCOM 2022", plan)
