"""Layers that take no time, and searches that have none."""

import pytest
from builders import graph, layer, star

from planner import Job, Problem, solve


@pytest.mark.parametrize("replication", [False, True])
def test_layers_without_any_time_are_planned(replication: bool) -> None:
    layers = graph([layer(name, 0.0, 0.0) for name in "abc"])
    problem = Problem(layers, star(2), Job(microbatches=4, replication=replication))
    assert solve(problem, time_limit_s=0.5, deterministic=True).iteration_time_s >= 0


def test_several_stages_a_device_may_take_no_time() -> None:
    layers = graph([layer(name, 0.0, 0.0) for name in "abcd"])
    problem = Problem(layers, star(2), Job(microbatches=4, max_stages_per_device=2))
    assert solve(problem, time_limit_s=0.5, deterministic=True).iteration_time_s >= 0


def test_a_search_without_time_has_a_plan() -> None:
    layers = graph([layer(name) for name in "abcd"])
    problem = Problem(layers, star(3), Job(microbatches=4))
    result = solve(problem, time_limit_s=1e-3, deterministic=True)
    assert 0 < result.lower_bound_s <= result.iteration_time_s * (1 + 1e-9)
