"""The search over tensor-parallel groups of several sizes against every plan of tiny problems."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from brute_force import brute_force
from builders import cluster, device_type, link
from group_problems import tiny_graph, tiny_problem

from planner import Job, Plan, Problem, solve, verify
from planner.cluster.cluster import Cluster
from planner.cluster.group_packing import packed, packed_in_turn
from planner.errors import InfeasibleError
from planner.model.layer_graph import LayerGraph
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.prediction import refresh
from planner.search.mixed_groups import MOST_PACKINGS, mixed_packings

SETTINGS = {"time_limit_s": 0.5, "deterministic": True}


def job(**fields: object) -> dict[str, Any]:
    return {"microbatches": 2, "backward": "whole", "overlap_reduction": False, **fields}


def with_degree(problem: Problem, degree: int | str) -> Problem:
    return replace(problem, job=problem.job.model_copy(update={"tensor_parallel": degree}))


def nodes(sizes: Mapping[str, int], gb_per_s: Mapping[str, float] | None = None) -> Cluster:
    """Nodes of one type of device, each on a switch of its own, all joined."""
    names = [f"{node}/gpu{i}" for node, count in sizes.items() for i in range(count)]
    width = {node: (gb_per_s or {}).get(node, 10.0) for node in sizes}
    links = [link(name, name.partition("/")[0], width[name.partition("/")[0]]) for name in names]
    links += [link(node, "spine", 1.0) for node in sizes]
    return cluster(names, links, [*sizes, "spine"], {"unit": device_type()})


def sizes_of(parallel: TensorParallel) -> dict[str, list[int]]:
    """The sizes of groups by node."""
    found: dict[str, list[int]] = {}
    for group in parallel.groups:
        node = group.devices[0].partition("/")[0]
        found.setdefault(node, []).append(len(group.devices))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_bound_holds_and_the_plan_is_the_best_of_all_sizes(seed: int) -> None:
    problem = tiny_problem(seed, layers=2 + seed % 2, devices=3, **job(replication=seed == 0))
    pairs = packed(problem.cluster, 2)
    rest = packed_in_turn(problem.cluster, [2, 1])
    assert [len(group.devices) for group in rest] == [2, 1]
    mixed = grouped_problem(problem, TensorParallel(groups=rest))
    problems = [
        with_degree(problem, 1),
        grouped_problem(problem, TensorParallel(groups=pairs)),
    ]
    best_s = min(brute_force(row).time_s for row in problems)
    found = solve(with_degree(problem, "any"), **SETTINGS)
    assert found.lower_bound_s <= best_s * (1 + 1e-9)
    assert found.iteration_time_s >= best_s * (1 - 1e-9)
    assert found.iteration_time_s == pytest.approx(best_s)
    assert verify(found.plan) == []
    alone = solve(mixed, **SETTINGS)
    assert alone.lower_bound_s <= brute_force(mixed).time_s * (1 + 1e-9)


def small_and_large() -> Problem:
    """Two layers that fill a large device each, or two small ones together."""
    kinds = {
        "small": device_type(memory_gib=1.0, reserved_gib=0.0),
        "large": device_type(memory_gib=2.0, reserved_gib=0.0),
    }
    names = {"n0/gpu0": "small", "n0/gpu1": "small", "n1/gpu0": "large"}
    machines = cluster(names, [link(name, "hub") for name in names], ["hub"], kinds)
    drawn = tiny_problem(5, layers=2, devices=2, **job(optimizer="sgd"))
    size = {"bytes": 600 * 2**20, "elements": 150 * 2**20}
    rows = [
        row.model_copy(update=size if row.name.startswith("p") else {})
        for row in drawn.graph.record.parameters
    ]
    record = drawn.graph.record.model_copy(update={"parameters": tuple(rows)})
    return replace(drawn, graph=LayerGraph.from_record(record), cluster=machines)


def test_a_group_and_a_single_device_hold_what_groups_of_one_size_do_not() -> None:
    problem = small_and_large()
    for degree in (1, 2):
        with pytest.raises(InfeasibleError):
            solve(with_degree(problem, degree), **SETTINGS)
    found = solve(with_degree(problem, "any"), **SETTINGS)
    plan = found.plan
    assert plan.degrees == (1, 2)
    assert {plan.members(name) for name in plan.ranks} == {
        ("n0/gpu0", "n0/gpu1"),
        ("n1/gpu0",),
    }
    assert verify(plan) == []
    assert "1 group of 1 and 1 group of 2" in plan.provenance.solver
    assert "or 1 packing in groups of several sizes" in str(plan.provenance.bound_covers)
    assert 0 < found.lower_bound_s <= found.iteration_time_s
    assert refresh(plan).predicted.lower_bound_s == found.lower_bound_s
    # Other groups are not those of the bound.
    assert plan.tensor_parallel is not None
    groups = tuple(
        group.model_copy(update={"devices": group.devices[::-1]})
        for group in plan.tensor_parallel.groups
    )
    parallel = plan.tensor_parallel.model_copy(update={"groups": groups})
    changed = plan.model_copy(update={"tensor_parallel": parallel})
    assert "other groups than the search packed" in " ".join(verify(refresh_times(changed)))
    assert refresh(changed).predicted.lower_bound_s == 0
    assert verify(refresh(changed)) == []


def refresh_times(plan: Plan) -> Plan:
    """The plan with the times of its simulation and the bound that it had."""
    fresh = refresh(plan)
    figures = {"lower_bound_s": plan.predicted.lower_bound_s, "gap": plan.predicted.gap}
    predicted = fresh.predicted.model_copy(update=figures)
    update = {"predicted": predicted, "provenance": plan.provenance}
    return fresh.model_copy(update=update)


def on_nodes(machines: Cluster, degrees: Sequence[int], **fields: object) -> Problem:
    graph = tiny_graph(random.Random(1), 4, [degree for degree in degrees if degree > 1])
    return Problem(graph, machines, Job.model_validate({"tensor_parallel": "any", **fields}))


def test_each_kind_of_node_has_its_own_size() -> None:
    """Collectives on narrow links take long: such nodes have single devices."""
    machines = nodes({"n0": 2, "n1": 2, "n2": 2, "n3": 2}, {"n2": 0.01, "n3": 0.01})
    problem = on_nodes(machines, [1, 2], microbatches=1)
    packings = [sizes_of(parallel) for parallel in mixed_packings(problem, [1, 2])]
    assert {"n0": [2], "n1": [2], "n2": [1, 1], "n3": [1, 1]} in packings
    alike = nodes({"n0": 2, "n1": 2})
    assert mixed_packings(on_nodes(alike, [1, 2]), [1, 2]) == []


def test_runtimes_of_others_have_groups_of_one_size() -> None:
    machines = nodes({"n0": 2, "n1": 2}, {"n1": 0.01})
    problem = on_nodes(machines, [1, 2], microbatches=1)
    assert len(mixed_packings(problem, [1, 2])) <= MOST_PACKINGS
    assert all(len(row.degrees) > 1 for row in mixed_packings(problem, [1, 2]))
    assert mixed_packings(problem, [1, 2])
    megatron = problem.job.model_copy(update={"runtime": "megatron"})
    assert mixed_packings(replace(problem, job=megatron), [1, 2]) == []
