"""SPP's parts against trying everything."""

import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest
from builders import boundary, graph, layer, star
from hypothesis import given
from planner_layers import layers_of
from strategies import clusters
from tiny_problems import tiny_problem

from planner import Cluster, Job, Problem
from planner.baselines.along import Row
from planner.baselines.layers import Layers, Stage, Stages
from planner.baselines.pipedream import flat_plan
from planner.baselines.spp import minimum_cut_order, plan, recursive_device_order
from planner.baselines.stage_costs import StageCosts
from planner.costs.collectives import all_reduce_s
from planner.costs.placement import place
from planner.schedules.pe import blocks_of, makespan_s


def partitions_in_order(chain: Layers, order: tuple[str, ...]) -> Iterator[Stages]:
    """Stages on neighbours of the order, some devices at both ends unused."""
    length = chain.length
    for count in range(1, min(length, len(order)) + 1):
        for cuts in combinations(range(1, length), count - 1):
            edges = [0, *cuts, length]
            for borders in combinations(range(len(order) + 1), count + 1):
                yield tuple(
                    Stage(edges[j], edges[j + 1], order[borders[j] : borders[j + 1]])
                    for j in range(count)
                )


def slowest_way_s(cluster: Cluster, sources, targets, bytes_: float) -> float:
    routes = [cluster.route(u, v) for u in sources for v in targets]
    return max(r.latency_s for r in routes) + max(
        bytes_ / r.bandwidth_gb_per_s / 1e9 for r in routes
    )


def stage_terms(chain: Layers, stage: Stage) -> tuple[float, float]:
    """M microbatches shared evenly at the pace of the slowest replica, and the all-reduce."""
    cluster = chain.problem.cluster
    layers = slice(stage.begin, stage.end)
    times = [
        float((chain.forward_s + chain.backward_s)[kind, layers].sum())
        for kind in {chain.kind_of(device) for device in stage.devices}
    ]
    gradients = int(chain.gradient_bytes[layers].sum())
    work_s = chain.problem.job.microbatches * max(times) / len(stage.devices)
    ring = [device for device in cluster.device_names if device in stage.devices]
    return work_s, all_reduce_s(cluster, ring, gradients)


def channel_terms(chain: Layers, partition: Stages) -> Iterator[float]:
    arrays = chain.table.arrays
    for first, second in pairwise(partition):
        ways = [
            slowest_way_s(chain.problem.cluster, first.devices, second.devices, float(bytes_))
            for bytes_ in (arrays.sent[0, first.end], arrays.returned[0, first.end])
        ]
        pairs = min(len(first.devices), len(second.devices))
        yield chain.problem.job.microbatches * sum(ways) / pairs


def spp_bottleneck_s(chain: Layers, partition: Stages) -> float:
    return max([*(sum(stage_terms(chain, s)) for s in partition), *channel_terms(chain, partition)])


def pipedream_bottleneck_s(chain: Layers, partition: Stages) -> float:
    return max([*(max(stage_terms(chain, s)) for s in partition), *channel_terms(chain, partition)])


def pe_s(chain: Layers, partition: Stages) -> float:
    pipeline = place(chain.problem, chain.specs(partition))
    return makespan_s(blocks_of(pipeline), pipeline.microbatches)


CASES = [(seed, types) for seed in range(8) for types in (1, 2)]


@pytest.mark.parametrize(("seed", "types"), CASES)
def test_spp_has_the_least_bottleneck_of_its_number_of_stages(seed: int, types: int) -> None:
    chain = layers_of(
        tiny_problem(seed, layers=5, devices=4, microbatches=6, types=types, link_scale=4)
    )
    order = tuple(block[0] for block in recursive_device_order(chain))
    found = plan(chain)
    least: dict[int, float] = {}
    for partition in partitions_in_order(chain, order):
        time_s = spp_bottleneck_s(chain, partition)
        least[len(partition)] = min(time_s, least.get(len(partition), time_s))
    assert spp_bottleneck_s(chain, found) == pytest.approx(least[len(found)], rel=1e-3)
    # No number of stages whose bottleneck alone takes longer than PE could have won.
    assert min(least.values()) <= pe_s(chain, found) * (1 + 1e-3)


@pytest.mark.parametrize(("seed", "types"), CASES)
def test_pipedream_has_the_least_bottleneck_in_file_order(seed: int, types: int) -> None:
    chain = layers_of(
        tiny_problem(seed, layers=5, devices=4, microbatches=6, types=types, link_scale=4)
    )
    order = chain.problem.cluster.device_names
    every = [pipedream_bottleneck_s(chain, p) for p in partitions_in_order(chain, order)]
    found = pipedream_bottleneck_s(chain, flat_plan(chain))
    assert found == pytest.approx(min(every), rel=1e-3)


@pytest.mark.parametrize("devices", [17, 18, 19, 20])
def test_prm_takes_every_number_of_more_than_16_devices(devices: int) -> None:
    """Against trying all stages of two layers on neighbours of the order.

    Links without latency: an all-reduce takes a time in proportion to its bytes then.
    """
    chain = layers_of(
        tiny_problem(
            devices,
            layers=2,
            devices=devices,
            microbatches=6,
            types=2,
            topology="switches",
            link_scale=200,
        )
    )
    blocks = recursive_device_order(chain)
    order = tuple(block[0] for block in blocks)
    terms = cache(partial(stage_terms, chain))
    least = {1: math.inf, 2: math.inf}
    for partition in partitions_in_order(chain, order):
        # Most are too slow by their stages alone.
        time_s = max(sum(terms(stage)) for stage in partition)
        if time_s < least[len(partition)]:
            time_s = max([time_s, *channel_terms(chain, partition)])
            least[len(partition)] = min(time_s, least[len(partition)])
    bottlenecks_s = {len(p): time_s for time_s, p in Row(StageCosts(chain, blocks), np.add).best()}
    for count in (1, 2):
        assert bottlenecks_s[count] == pytest.approx(least[count], rel=1e-3)
    found_s = pe_s(chain, plan(chain))
    for _, stages in Row(StageCosts(chain, blocks), np.add).best():
        assert found_s <= pe_s(chain, stages) * (1 + 1e-9)


def test_more_than_16_devices_are_used_in_other_numbers_than_powers_of_two() -> None:
    """20 devices, one heavy and one light layer of 3 to 1, no cost of links: 15 and 5 devices."""
    heavy, light = layer("a", 3, 6, peak_bytes=0), layer("b", 1, 2, peak_bytes=0)
    model = graph([heavy, light], [boundary("a", "b", bytes_=1)])
    problem = Problem(model, star(20), Job(microbatches=120, max_stages=2, backward="whole"))
    chain = layers_of(problem)
    row = Row(StageCosts(chain, recursive_device_order(chain)), np.add)
    *_, (_, stages) = row.best()
    assert [len(stage.devices) for stage in stages] == [15, 5]


def test_spp_takes_the_number_of_stages_with_the_least_makespan() -> None:
    """Neither the most stages nor the least bottleneck is always what it chooses."""
    chosen = []
    for seed in range(6):
        problem = tiny_problem(seed, layers=6, devices=4, microbatches=3, replication=False)
        chosen.append(len(plan(layers_of(problem))))
    assert len(set(chosen)) > 1


@given(clusters(min_devices=3))
def test_a_device_order_starts_with_one_side_of_a_minimum_cut(cluster: Cluster) -> None:
    names = cluster.device_names
    order = tuple(names[n] for n in minimum_cut_order(cluster, names))
    assert sorted(order) == sorted(cluster.device_names)
    width = nx.Graph()
    for u, v in combinations(order, 2):
        route = cluster.route(u, v)
        width.add_edge(u, v, weight=0.0 if route is None else route.bandwidth_gb_per_s)
    sides = [set(side) for n in range(1, len(order)) for side in combinations(order, n)]
    least = min(nx.cut_size(width, side, weight="weight") for side in sides)
    prefixes = [nx.cut_size(width, order[:n], weight="weight") for n in range(1, len(order))]
    assert min(prefixes) == pytest.approx(least)
