"""Stages of graphs with branches: intervals of the file's order, against every choice tried."""

import pytest
from ortools.sat.python import cp_model
from small_graphs import (
    bound_within_memory_s,
    branching_problem,
    interval_divisions,
    least_bound_s,
)

from planner.costs.placement import place
from planner.search.partition.chain import Chain
from planner.search.partition.cp_sat.model import PartitionModel


def optimum(problem, horizon_s):
    chain = Chain(problem)
    model = PartitionModel(chain, horizon_s, len(problem.cluster.devices))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return solver.objective_value * model.tick_s, model.tick_s, model.stages(solver)


@pytest.mark.parametrize("seed", range(8))
def test_optimum_is_the_least_bound_of_all_divisions_of_the_graph(seed):
    problem = branching_problem(seed, layers=6, devices=3 if seed % 2 else 2)
    divisions = list(interval_divisions(problem))
    best_s = least_bound_s(problem, divisions)
    found_s, tick_s, stages = optimum(problem, 1.01 * best_s)
    assert best_s * (1 - 1e-6) - 1.01 * tick_s <= found_s <= best_s * (1 + 1e-9)
    assert bound_within_memory_s(place(problem, stages)) <= best_s * (1 + 1e-6) + 1.01 * tick_s


@pytest.mark.parametrize("memory_mib", [40, 60, 90])
@pytest.mark.parametrize("seed", range(5))
def test_stalls_are_traded_for_recomputation_as_every_choice_tried_says(seed, memory_mib):
    problem = branching_problem(
        seed, layers=5, devices=2, memory_mib=memory_mib, microbatches=5, recompute=True
    )
    divisions = list(interval_divisions(problem))
    best_s = least_bound_s(problem, divisions)
    if best_s == float("inf"):
        chain = Chain(problem)
        model = PartitionModel(chain, 10.0, 2)
        assert cp_model.CpSolver().solve(model.model) == cp_model.INFEASIBLE
        return
    found_s, tick_s, stages = optimum(problem, 1.01 * best_s)
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
                bounds.append(least_bound_s(problem, list(interval_divisions(problem))))
            found.append(bounds)
    assert any(free < none == float("inf") for free, none in found)
    assert any(free < none < float("inf") for free, none in found)
