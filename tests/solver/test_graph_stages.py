"""Stages of graphs with branches: any sets of layers that no edge leaves backwards."""

import pytest
from builders import boundary, cluster, graph, layer, link
from ortools.sat.python import cp_model
from small_graphs import (
    bound_within_memory_s,
    branching_problem,
    is_interval_division,
    least_bound_s,
    monotone_divisions,
)

from planner import Job, Problem
from planner.costs.placement import place
from planner.search.partition.chain import Chain
from planner.search.partition.cp_sat.model import PartitionModel
from planner.search.partition.cp_sat.optimum import search_partition


def optimum(problem, horizon_s, form):
    chain = Chain(problem)
    model = PartitionModel(chain, horizon_s, len(problem.cluster.devices), form=form)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return solver.objective_value * model.tick_s, model.tick_s, model.stages(solver)


@pytest.mark.parametrize("form", ["graph", "chain"])
@pytest.mark.parametrize("seed", range(8))
def test_optimum_is_the_least_bound_of_all_divisions_of_the_graph(seed, form):
    problem = branching_problem(seed, layers=6, devices=3 if seed % 2 else 2)
    divisions = list(monotone_divisions(problem))
    if form == "chain":
        divisions = [d for d in divisions if is_interval_division(problem, d)]
    best_s = least_bound_s(problem, divisions)
    found_s, tick_s, stages = optimum(problem, 1.01 * best_s, form)
    assert best_s * (1 - 1e-6) - 1.01 * tick_s <= found_s <= best_s * (1 + 1e-9)
    assert bound_within_memory_s(place(problem, stages)) <= best_s * (1 + 1e-6) + 1.01 * tick_s


@pytest.mark.parametrize("form", ["graph", "chain"])
@pytest.mark.parametrize("memory_mib", [40, 60, 90])
@pytest.mark.parametrize("seed", range(5))
def test_stalls_are_traded_for_recomputation_as_every_choice_tried_says(seed, memory_mib, form):
    problem = branching_problem(
        seed, layers=5, devices=2, memory_mib=memory_mib, microbatches=5, recompute=True
    )
    divisions = list(monotone_divisions(problem))
    if form == "chain":
        divisions = [d for d in divisions if is_interval_division(problem, d)]
    best_s = least_bound_s(problem, divisions)
    if best_s == float("inf"):
        chain = Chain(problem)
        model = PartitionModel(chain, 10.0, 2, form=form)
        assert cp_model.CpSolver().solve(model.model) == cp_model.INFEASIBLE
        return
    found_s, tick_s, stages = optimum(problem, 1.01 * best_s, form)
    assert best_s * (1 - 1e-6) - 1.01 * tick_s <= found_s <= best_s * (1 + 1e-9)
    assert bound_within_memory_s(place(problem, stages)) <= best_s * (1 + 1e-6) + 1.01 * tick_s


def test_memory_decides_in_these_problems_what_is_recomputed():
    found = []
    for seed in range(5):
        for memory_mib in (40, 60, 90):
            bounds = []
            for recompute in (True, False):
                problem = branching_problem(
                    seed,
                    layers=5,
                    devices=2,
                    memory_mib=memory_mib,
                    microbatches=5,
                    recompute=recompute,
                )
                bounds.append(least_bound_s(problem, list(monotone_divisions(problem))))
            found.append(bounds)
    assert any(free < none == float("inf") for free, none in found)
    assert any(free < none < float("inf") for free, none in found)


def two_branches() -> Problem:
    """Two branches of two layers each, listed in turns; what they pass on is large.

    Cut between the layers of each branch both tensors are sent; cut between the branches none.
    """
    rows = [layer("start", 0.01, 0.02)]
    rows += [layer(name, 1, 2) for name in ("a1", "b1", "a2", "b2")]
    rows.append(layer("end", 0.01, 0.02))
    wide, narrow = 10**9, 10**6
    tensors = [
        boundary("start", "a1", bytes_=narrow),
        boundary("start", "b1", bytes_=narrow),
        boundary("a1", "a2", bytes_=wide),
        boundary("b1", "b2", bytes_=wide),
        boundary("a2", "end", bytes_=narrow),
        boundary("b2", "end", bytes_=narrow),
    ]
    machines = cluster(["d0", "d1"], [link("d0", "d1", gb_per_s=1)])
    job = Job(microbatches=8, replication=False, recompute=False)
    return Problem(graph(rows, tensors), machines, job)


def test_a_whole_branch_in_each_stage_beats_every_cut_of_the_files_order():
    problem = two_branches()
    divisions = list(monotone_divisions(problem))
    intervals = [d for d in divisions if is_interval_division(problem, d)]
    of_graph = search_partition(problem, form="graph", time_limit_s=600)
    of_chain = search_partition(problem, form="chain", time_limit_s=600)
    assert of_graph.status == of_chain.status == "optimal"
    assert of_chain.objective_s == pytest.approx(least_bound_s(problem, intervals), rel=1e-4)
    assert of_graph.objective_s == pytest.approx(least_bound_s(problem, divisions), rel=1e-4)
    assert of_graph.objective_s < 0.95 * of_chain.objective_s
    assert any(set(stage.layers) >= {"a1", "a2"} for stage in of_graph.stages)


@pytest.mark.parametrize("seed", range(4))
def test_forbidden_stages_do_not_come_back(seed):
    problem = branching_problem(seed, layers=5, devices=2)
    chain = Chain(problem)
    model = PartitionModel(chain, 10.0, 2, form="graph")
    solver = cp_model.CpSolver()
    seen, values = [], []
    while solver.solve(model.model) == cp_model.OPTIMAL:
        seen.append(model.stages(solver))
        values.append(solver.objective_value)
        model.forbid(seen[-1])
    every = [stages for division in monotone_divisions(problem) for stages in [division]]
    distinct = {tuple(stage.layers for stage in stages) for stages in seen}
    assert distinct == {tuple(map(tuple, division)) for division in every}
    assert values == sorted(values)
