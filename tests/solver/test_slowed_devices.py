"""Devices that others of their host or their own messages slow: plans, and bounds on all plans."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import boundary, graph, layer, star
from solver.brute_force import all_orders, all_partitions
from solver.runtime_brute_force import simulated_s
from tiny_problems import tiny_problem

from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import Host
from planner.costs.placement import is_connected, place
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.problem import Problem
from planner.search.orders.bound import StagesBound
from planner.search.solve import solve
from planner.variants.clusters import with_copies, without
from planner.verification import verify

NAMES = "abcdefgh"
LAYERS = graph(
    [layer(name) for name in NAMES],
    [boundary(a, b, bytes_=0) for a, b in pairwise(NAMES)],
)


def on_hosts(devices: int, *hosts: Host) -> Cluster:
    return star(devices).model_copy(update={"hosts": hosts})


def solved(cluster: Cluster, **job: object) -> tuple[float, float, set[str]]:
    problem = Problem(LAYERS, cluster, Job(microbatches=8, **job))  # type: ignore[arg-type]
    result = solve(problem, time_limit_s=1, deterministic=True)
    assert verify(result.plan) == []
    assert result.lower_bound_s <= result.iteration_time_s
    return result.iteration_time_s, result.lower_bound_s, set(result.plan.ranks)


def test_devices_that_add_nothing_are_left_out() -> None:
    """Four devices on two cores do 24 s x 8 in no less than two: two stages have fewer bubbles."""
    host = Host(devices=("d0", "d1", "d2", "d3"), slowdown=(1, 1, 1.5, 2))
    time_s, bound_s, used = solved(on_hosts(4, host), replication=False)
    assert bound_s == pytest.approx(8 * 24 / 2, rel=1e-3)
    two_s, *_ = solved(star(2), replication=False)
    assert time_s <= two_s * (1 + 1e-9)
    assert len(used) == 2 or time_s < two_s


def test_the_work_bound_counts_what_a_host_does_at_once() -> None:
    """A host of 1.5 devices' worth and a device of its own: all work takes 192 s / 2.5."""
    host = Host(devices=("d0", "d1"), slowdown=(1, 4 / 3))
    time_s, bound_s, _ = solved(on_hosts(3, host))
    assert bound_s >= 8 * 24 / 2.5 * (1 - 1e-6)
    assert time_s >= bound_s


def _slowed(problem: Problem, factor: float, *, host: bool) -> Problem:
    """The same devices, slowed by communication, and where they are of one host by each other."""
    machines = problem.cluster
    changed = {
        "compute_slowdown_while_communicating": factor,
        "communication_slowdown_while_computing": 2 * factor,
    }
    types = {name: row.model_copy(update=changed) for name, row in machines.device_types.items()}
    names = machines.device_names
    slowdown = tuple(1 + number / 4 for number in range(len(names)))
    hosts = (Host(devices=names, slowdown=slowdown),) if host else ()
    cluster = machines.model_copy(update={"device_types": types, "hosts": hosts})
    return replace(problem, cluster=cluster)


@pytest.mark.parametrize("seed", [0, 2, 5, 7])
def test_no_bound_exceeds_the_best_of_all_plans_where_devices_are_slowed(seed: int) -> None:
    """By trying every partition, assignment and order, and for each partition every bound on it."""
    tiny = tiny_problem(
        seed,
        layers=3,
        devices=2,
        microbatches=2,
        types=1 + seed % 2,
        overlap=True,
        memory_mib=(1000, 90)[seed // 4],
    )
    problem = _slowed(tiny, 1.5, host=seed % 3 == 2)
    best_s = math.inf
    for specs in all_partitions(problem):
        placed = place(problem, specs)
        if not is_connected(placed):
            continue
        found_s = min(simulated_s(placed, orders) for orders in all_orders(placed))
        assert StagesBound(placed, splits=False).seconds <= found_s * (1 + 1e-9)
        best_s = min(best_s, found_s)
    result = solve(problem, time_limit_s=0.5, deterministic=True)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    assert result.iteration_time_s >= best_s * (1 - 1e-9)
    assert verify(result.plan) == []


def test_hosts_follow_their_devices() -> None:
    cluster = on_hosts(3, Host(devices=("d0", "d1", "d2"), slowdown=(1, 1.25, 2)))
    assert without(cluster, ["d1"]).hosts == (Host(devices=("d0", "d2"), slowdown=(1, 1.25)),)
    assert without(cluster, ["d0", "d1", "d2"]).hosts == ()
    copied = with_copies(cluster, {"d0": "e0", "d2": "e2"})
    assert copied.hosts[1] == Host(devices=("e0", "e2"), slowdown=(1, 1.25))
    node = {"name": "n", "devices": 2, "type": "A100-80GB", "link": "NVLink3"}
    data = {"format": "pipeplan-cluster/1", "nodes": [{**node, "slowdown": [1, 1.5]}]}
    short = Cluster.from_data(data)
    assert short.hosts == (Host(devices=("n/gpu0", "n/gpu1"), slowdown=(1, 1.5)),)
    assert Cluster.from_data(short.model_dump(mode="json")) == short


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([{"devices": ["d0", "d1"], "slowdown": [1]}], "slowdown has 1 factor for 2 devices"),
        ([{"devices": ["d0", "d1"], "slowdown": [1.5, 2]}], "begins with 1.5"),
        (
            [{"devices": ["d0", "d1", "d2"], "slowdown": [1, 2, 1.5]}],
            "falls from 2 to 1.5 with 3 devices",
        ),
        ([{"devices": ["d0", "x"], "slowdown": [1, 2]}], "unknown device 'x'"),
        ([{"devices": ["d0", "d0"], "slowdown": [1, 2]}], "'d0' is named twice"),
    ],
)
def test_wrong_hosts_are_refused(hosts: list[dict], message: str) -> None:
    data = {**star(3).model_dump(mode="json"), "hosts": hosts}
    with pytest.raises(PipeplanError, match=message):
        Cluster.from_data(data)
