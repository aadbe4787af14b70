"""The partition model's optimum is the least bound over all partitions, by brute force."""

import pytest
from brute_force import all_partitions
from ortools.sat.python import cp_model
from tiny_problems import tiny_problem

from planner.costs.placement import place
from planner.partition.bounds import schedule_bound_s
from planner.partition.chain import Chain
from planner.partition.exact.model import PartitionModel
from planner.partition.relaxation import work_bound_s
from planner.schedule.heuristic import best_heuristic_schedule


def solved(problem, horizon_s):
    chain = Chain(problem)
    count = min(chain.length, len(problem.cluster.devices))
    model = PartitionModel(chain, horizon_s, count)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 8  # Of several kinds: some alone take minutes.
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return chain, model, solver


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("types", "replication"), [(1, False), (2, False), (1, True), (2, True)])
def test_optimum_is_the_least_bound_of_all_partitions(seed, types, replication):
    problem = tiny_problem(
        seed, layers=5, devices=3, microbatches=5, types=types, replication=replication
    )
    bounds = [schedule_bound_s(place(problem, specs)) for specs in all_partitions(problem)]
    chain, model, solver = solved(problem, 2 * max(bounds))
    found_s = solver.objective_value * model.tick_s
    # The bound sharpens all-reduces only at some replica counts, all of them here.
    assert found_s <= min(bounds) * (1 + 1e-9)
    assert found_s >= min(bounds) * (1 - 1e-6) - 1.01 * model.tick_s
    chosen = place(problem, chain.specs(model.partition(solver)))
    assert schedule_bound_s(chosen) <= min(bounds) + 1.01 * model.tick_s


@pytest.mark.parametrize("seed", range(6))
def test_work_bound_is_below_every_partitions_schedule(seed):
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=4, types=2)
    bound = work_bound_s(Chain(problem))
    for specs in all_partitions(problem):
        pipeline = place(problem, specs)
        schedule = best_heuristic_schedule(pipeline)
        if schedule is not None:
            assert bound <= schedule.iteration_time_s * (1 + 1e-9)
            assert schedule_bound_s(pipeline) <= schedule.iteration_time_s * (1 + 1e-9)


def test_forbidden_partition_does_not_come_back():
    problem = tiny_problem(3, layers=4, devices=3, microbatches=4)
    _, model, solver = solved(problem, 10.0)
    seen = [model.partition(solver)]
    values = [solver.objective_value]
    for _ in range(5):
        model.forbid(seen[-1])
        assert solver.solve(model.model) == cp_model.OPTIMAL
        seen.append(model.partition(solver))
        values.append(solver.objective_value)
    assert len(set(seen)) == len(seen)
    assert values == sorted(values)


def test_users_can_add_constraints_to_the_model():
    problem = tiny_problem(4, layers=5, devices=3, microbatches=5)
    _, model, solver = solved(problem, 10.0)
    free = solver.objective_value
    for stage in model.decisions.stages:
        model.model.add(model.decisions.on[stage, 0] == 0)  # Device d0 is needed elsewhere.
    assert solver.solve(model.model) == cp_model.OPTIMAL
    assert all("d0" not in stage.devices for stage in model.partition(solver))
    assert solver.objective_value >= free
