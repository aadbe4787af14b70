"""Bounds over relaxed clusters against every partition of small problems."""

import math
from typing import Any

import pytest
from brute_force import all_partitions
from hypothesis import given
from hypothesis import strategies as st
from tiny_problems import tiny_problem

from planner import Cluster, Job, Problem
from planner.costs.placement import is_connected, place
from planner.partition.bounds import priced_cluster, relaxed_cluster
from planner.partition.bounds.priced_cluster import PricedCluster
from planner.partition.bounds.relaxed_cluster import RelaxedCluster
from planner.partition.bounds.schedule import schedule_bound_s
from planner.partition.bounds.work import work_bound_s
from planner.partition.chain import Chain
from planner.partition.intervals import coarse_cuts

ROUNDING = 1 + 1e-9
CASES = [
    {"layers": 5, "devices": 3, "types": types, "replication": replication, "topology": topology}
    for types in (1, 2, 3)
    for replication in (False, True)
    for topology in ("mesh", "chain", "switches")
]


def least_bound_s(problem: Problem) -> float:
    placed = (place(problem, specs) for specs in all_partitions(problem))
    return min((schedule_bound_s(p) for p in placed if is_connected(p)), default=math.inf)


def bounds_s(problem: Problem, known_s: float) -> tuple[float, float]:
    chain, links = Chain(problem), problem.cluster.link_table
    relaxed = RelaxedCluster(chain, links).bound_s(known_s)
    return relaxed, PricedCluster(chain, links).bound_s(known_s)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_no_partition_beats_a_relaxation(case: dict[str, Any], seed: int) -> None:
    problem = tiny_problem(seed, microbatches=5, **case)
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert work_bound_s(Chain(problem)) <= bound_s * ROUNDING
        assert bound_s <= best_s * ROUNDING


@given(st.data())
def test_no_partition_of_any_small_problem_beats_a_relaxation(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 4))
    problem = tiny_problem(
        data.draw(st.integers(0, 999)),
        layers=data.draw(st.integers(2, 4)),
        devices=devices,
        microbatches=data.draw(st.integers(1, 7)),
        types=data.draw(st.integers(1, 3)),
        replication=data.draw(st.booleans()),
        tied=data.draw(st.booleans()),
        topology=data.draw(st.sampled_from(["mesh", "chain", "switches"])),
        cut_mib=data.draw(st.sampled_from([1.0, 7.5, 30.0, 100.0])),
        link_scale=data.draw(st.sampled_from([0.2, 1.0, 5.0])),
    )
    node = data.draw(st.sampled_from([None, 1, 2, 3]))
    if node is not None:
        inside, outside = data.draw(st.sampled_from([(10, 0.2), (2, 0.5), (1, 1), (0.5, 5)]))
        problem = with_links(problem, inside=inside, outside=outside, node=node)
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


@pytest.mark.parametrize("seed", range(4))
def test_on_like_devices_and_links_the_relaxation_is_exact(seed: int) -> None:
    problem = tiny_problem(seed, layers=6, devices=3, microbatches=6, replication=False)
    uniform = with_links(problem, inside=0.5, outside=0.5, node=3)
    best_s = least_bound_s(uniform)
    assert bounds_s(uniform, 2 * best_s)[0] == pytest.approx(best_s, rel=3e-4)


@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_crossings_of_a_network_are_counted_for_no_more_than_there_are(
    seed: int, replication: bool
) -> None:
    problem = tiny_problem(seed, layers=5, devices=4, microbatches=4, replication=replication)
    nodes = with_links(problem, inside=10.0, outside=0.2, node=2)
    assert nodes.cluster.link_table.groups is not None
    best_s = least_bound_s(nodes)
    for bound_s in bounds_s(nodes, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


@pytest.mark.parametrize("seed", [9, 16, 49])
def test_states_that_become_one_keep_the_lesser_time(seed: int) -> None:
    problem = tiny_problem(seed, layers=4, devices=5, microbatches=4, types=2)
    nodes = with_links(problem, inside=10.0, outside=0.2, node=2)
    best_s = least_bound_s(nodes)
    assert bounds_s(nodes, 2 * best_s)[0] <= best_s * ROUNDING


@pytest.mark.parametrize(("seed", "link_scale"), [(30, 1.0), (108, 1.0), (30, 0.2)])
def test_a_slower_replica_may_have_the_wider_link(seed: int, link_scale: float) -> None:
    problem = tiny_problem(
        seed, layers=3, devices=3, microbatches=2, types=3, cut_mib=30, link_scale=link_scale
    )
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert bound_s <= best_s * ROUNDING


def test_crossings_of_a_network_raise_the_bound() -> None:
    problem = tiny_problem(1, layers=6, devices=4, microbatches=2, replication=False)
    raised, plain = (
        bounds_s(with_links(problem, inside=10.0, outside=outside, node=2), 1e3)[0]
        for outside in (0.2, 10.0)
    )
    assert raised > plain * 1.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("types", [1, 2])
def test_relaxations_of_coarsened_chains_hold(
    seed: int, types: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (relaxed_cluster, priced_cluster):
        monkeypatch.setattr(module, "coarse_cuts", lambda chain: coarse_cuts(chain, 3))
    problem = tiny_problem(seed, layers=7, devices=3, microbatches=4, types=types)
    best_s = least_bound_s(problem)
    for bound_s in bounds_s(problem, 2 * best_s):
        assert 0 < bound_s <= best_s * ROUNDING


def test_layers_bound_to_a_type_raise_the_bound() -> None:
    problem = tiny_problem(3, layers=4, devices=2, microbatches=4, types=2, replication=False)
    times = {t: float(Chain(problem).forward_s(t).sum()) for t in Chain(problem).types}
    slow = max(times, key=times.__getitem__)
    record = problem.graph.record
    rows = tuple(row.model_copy(update={"device_types": (slow,)}) for row in record.layers)
    bound = Problem(
        type(problem.graph).from_record(record.model_copy(update={"layers": rows})),
        problem.cluster,
        problem.job,
    )
    assert bounds_s(bound, 1e3)[0] > bounds_s(problem, 1e3)[0] * 1.01


def with_links(problem: Problem, *, inside: float, outside: float, node: int) -> Problem:
    """The same devices in nodes of ``node``, on one network; without latency."""
    names = problem.cluster.device_names
    count = -(-len(names) // node)
    data = problem.cluster.model_dump(mode="json")
    data["switches"] = ["network", *(f"node{i}" for i in range(count))]
    data["links"] = [
        {"between": [name, f"node{i // node}"], "bandwidth_gb_per_s": inside}
        for i, name in enumerate(names)
    ]
    data["links"] += [
        {"between": [f"node{i}", "network"], "bandwidth_gb_per_s": outside} for i in range(count)
    ]
    job: Job = problem.job
    return Problem(problem.graph, Cluster.from_data(data), job)


@pytest.mark.parametrize("states", [1, 7, 14, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_a_stage_may_lie_in_more_groups_than_crossings_are_told_apart(
    seed: int, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxed_cluster, "MANY_STATES", states)
    problem = tiny_problem(seed, layers=3, devices=6, microbatches=6)
    nodes = with_links(problem, inside=10.0, outside=5.0, node=2)
    best_s = least_bound_s(nodes)
    assert bounds_s(nodes, 2 * best_s)[0] <= best_s * ROUNDING
