"""Earlier plans as a start."""

import pytest
from tiny_problems import tiny_problem

from planner import Cluster, Problem, solve
from planner.search.partition.chain import Chain


def test_the_search_is_never_slower_than_its_warm_start() -> None:
    problem = tiny_problem(3, layers=8, devices=4, microbatches=6, types=2)
    before = solve(problem, time_limit_s=0.5, deterministic=True)
    after = solve(problem, time_limit_s=0.01, deterministic=True, warm_starts=[before.plan])
    best = after.history[0].iteration_time_s
    # Its stages are scheduled first of all, quickly; CP-SAT may have improved their orders before.
    assert best <= before.iteration_time_s * 1.2
    assert after.iteration_time_s <= best


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
    chain = Chain(problem)
    names, devices = chain.names, problem.cluster.device_names
    assert chain.partition([(names[:2], devices[:1]), (names[2:], devices[1:])]) is not None
    assert chain.partition([(names[2:], devices[:1]), (names[:2], devices[1:])]) is None
    assert chain.partition([(names[:2], devices[:1])]) is None
    assert chain.partition([(names, ("gone",))]) is None
