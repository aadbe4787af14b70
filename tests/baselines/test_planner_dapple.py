"""DAPPLE's latency, placement policies and search against plain versions of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_layers import layers_of
from tiny_problems import tiny_problem

from planner import Cluster
from planner.baselines.dapple import Latency, Timed, extended, placements, plan
from planner.baselines.layers import Layers, Stage, Stages, equal_machines, machines
from planner.costs.placement import place
from planner.schedules.pe import blocks_of

seconds = st.integers(0, 9).map(float)


def pipeline_latency_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    all_reduce_s: Sequence[float],
    microbatches: int,
) -> float:
    """Channels are stages, too."""
    latency = Latency.nothing(1)
    for stage in zip(forward_s, backward_s, all_reduce_s, strict=True):
        latency = extended(latency, Timed(*(np.array([s]) for s in stage)), microbatches)
    return float(latency.total_s(microbatches)[0])


def plain_latency_s(
    forward: list[float], backward: list[float], reduce: list[float], microbatches: int
) -> float:
    """The definition, from the whole pipeline at once."""
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    steady = [(microbatches - 1) * seconds for seconds in both]
    pivot = len(both) - 1
    for stage in reversed(range(pivot)):
        if steady[stage] > steady[pivot] + sum(both[stage + 1 : pivot]):
            pivot = stage
    ending = max(
        reduce[i] + (sum(backward[i : pivot + 1]) if i <= pivot else -sum(backward[pivot + 1 : i]))
        for i in range(len(both))
    )
    return sum(forward[: pivot + 1]) + steady[pivot] + ending


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9), st.integers(1, 6))
def test_latency_stage_by_stage_is_that_of_the_whole_pipeline(rows, microbatches: int) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    assert pipeline_latency_s(*columns, microbatches) == plain_latency_s(*columns, microbatches)


def test_latency_by_hand() -> None:
    """Two stages, the first one the pivot: 1 + 3 * (1 + 2), then its last backward and 5."""
    assert pipeline_latency_s([1, 0.5], [2, 0.5], [5, 0], 4) == 1 + 9 + 2 + 5
    # The pivot is last: both forwards, 3 * (2 + 4), both backwards.
    assert pipeline_latency_s([1, 2], [2, 4], [0, 0], 4) == 3 + 18 + 6


def test_devices_are_placed_fresh_first_append_first_and_scatter_first() -> None:
    groups = ((0, 1, 2), (3, 4, 5), (6, 7))
    assert list(placements(groups, frozenset({0}), 2)) == [(3, 4), (1, 2), (1, 3)]
    assert list(placements(groups, frozenset({0}), 4)) == [(3, 4, 5, 6), (1, 2, 3, 4), (1, 2, 3, 6)]
    assert list(placements(groups, frozenset(), 8)) == [tuple(range(8))]
    assert list(placements(groups, frozenset({0}), 8)) == []


def test_machines_are_the_devices_on_one_switch() -> None:
    mesh = tiny_problem(0, layers=2, devices=3, microbatches=1).cluster
    assert machines(mesh) == (("d0",), ("d1",), ("d2",))
    assert equal_machines(mesh) is None
    switched = tiny_problem(0, layers=2, devices=6, microbatches=1, topology="switches").cluster
    hung = {
        name: {link.between[0] for link in switched.links if link.between[1] == name}
        for name in ("s0", "s1")
    }
    assert {frozenset(machine) for machine in machines(switched)} == {
        frozenset(devices - {"s0"}) for devices in hung.values() if devices - {"s0"}
    }


def latency_s(chain: Layers, partition: Stages) -> float:
    """From a placed pipeline: stages with the channels between them."""
    blocks = blocks_of(place(chain.problem, chain.specs(partition)))
    rows = []
    for stage in range(blocks.stages):
        rows.append((blocks.forward_s[stage], blocks.backward_s[stage], blocks.all_reduce_s[stage]))
        if stage < blocks.stages - 1:
            rows.append((blocks.send_s[stage], blocks.send_back_s[stage], 0.0))
    columns = [list(column) for column in zip(*rows, strict=True)]
    return plain_latency_s(*columns, chain.problem.job.microbatches)


def all_partitions(chain: Layers, most: int):
    devices = chain.problem.cluster.device_names
    for count in range(1, min(most, chain.length) + 1):
        for cuts in combinations(range(1, chain.length), count - 1):
            edges = [0, *cuts, chain.length]
            for used in range(count, len(devices) + 1):
                for row in permutations(devices, used):
                    for borders in combinations(range(1, used), count - 1):
                        ends = [0, *borders, used]
                        held = [row[ends[j] : ends[j + 1]] for j in range(count)]
                        if all(list(part) == sorted(part) for part in held):
                            yield tuple(
                                Stage(edges[j], edges[j + 1], held[j]) for j in range(count)
                            )


@pytest.mark.parametrize("seed", range(6))
def test_on_equal_devices_around_a_switch_the_search_finds_the_best_pipeline(seed: int) -> None:
    """All choices of devices are alike there; what is left is the number of them."""
    base = tiny_problem(seed, layers=5, devices=3, microbatches=5)
    types = {name: kind.model_dump() for name, kind in base.cluster.device_types.items()}
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": types,
            "devices": [device.model_dump() for device in base.cluster.devices],
            "switches": ["hub"],
            "links": [
                {"between": [name, "hub"], "bandwidth_gb_per_s": 0.5 + seed}
                for name in base.cluster.device_names
            ],
        }
    )
    chain = layers_of(replace(base, cluster=cluster))
    best = min(latency_s(chain, partition) for partition in all_partitions(chain, 3))
    assert latency_s(chain, plan(chain)) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_no_pipeline_found_is_better_than_the_best_there_is(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=5, types=2, link_scale=5)
    chain = layers_of(problem)
    best = min(latency_s(chain, partition) for partition in all_partitions(chain, 3))
    assert best * (1 - 1e-9) <= latency_s(chain, plan(chain)) <= 1.5 * best
