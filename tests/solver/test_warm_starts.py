"""Earlier plans as a start."""

import pytest
from tiny_problems import tiny_problem

from planner import Cluster, Problem, solve
from planner.costs.placed_pipeline import StageSpec
from planner.search.finish import starts_of


def test_the_search_is_never_slower_than_its_warm_start() -> None:
    problem = tiny_problem(3, layers=8, devices=4, microbatches=6, types=2)
    before = solve(problem, time_limit_s=0.5, deterministic=True)
    after = solve(problem, time_limit_s=0.01, deterministic=True, warm_starts=[before.plan])
    assert after.iteration_time_s <= before.iteration_time_s * (1 + 1e-9)


@pytest.mark.extensive
def test_a_warm_start_survives_the_loss_of_a_device() -> None:
    problem = tiny_problem(1, layers=6, devices=4, microbatches=6, link_scale=50.0)
    plan = solve(problem, time_limit_s=0.3, deterministic=True).plan
    lost = plan.ranks[-1]
    data = problem.cluster.model_dump(mode="json")
    data["devices"] = [row for row in data["devices"] if row["name"] != lost]
    data["links"] = [row for row in data["links"] if lost not in row["between"]]
    smaller = Problem(problem.graph, Cluster.from_data(data), problem.job)
    result = solve(smaller, time_limit_s=0.3, deterministic=True, warm_starts=[plan])
    assert lost not in result.plan.ranks


def test_stages_that_do_not_cut_the_chain_are_left_out() -> None:
    problem = tiny_problem(0, layers=4, devices=2, microbatches=2)
    names, devices = tuple(problem.graph.layers), problem.cluster.device_names
    d0, d1 = devices

    def are_taken(*stages: StageSpec) -> bool:
        return any(starts_of(problem, [stages]))

    assert are_taken(StageSpec(names[:2], (d0,)), StageSpec(names[2:], (d1,)))
    assert not are_taken(StageSpec(names[2:], (d0,)), StageSpec(names[:2], (d1,)))
    assert not are_taken(StageSpec(names[:2], (d0,)))
    assert not are_taken(StageSpec(names, ("gone",)))
