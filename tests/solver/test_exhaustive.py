"""Bounds and proved optima hold in spaces of every kind, against every plan of tiny problems."""

import pytest

from benchmarks.plans.oracle import optimum_below, tiny_problems
from planner import Problem, solve

PROBLEMS = [p for p in tiny_problems(40, seed=1) if p.job.max_stages_per_device == 1]


def excess(problem: Problem) -> float:
    """Solve; return by how much the plan is above the optimum, which no bound is."""
    result = solve(problem, time_limit_s=2, deterministic=True)
    optimum = optimum_below(problem, result.iteration_time_s)
    assert result.lower_bound_s <= optimum.time_s * (1 + 1e-6)
    over = result.iteration_time_s / optimum.time_s - 1
    if result.status == "optimal":
        assert over <= 2e-4
    return over


@pytest.mark.parametrize("problem", PROBLEMS[:4], ids="{0.job.backward}".format)
def test_a_bound_is_never_above_the_best_of_all_plans(problem: Problem) -> None:
    excess(problem)


@pytest.mark.extensive
def test_nearly_every_best_plan_with_one_stage_a_device_is_found() -> None:
    found = [excess(problem) <= 1e-4 for problem in PROBLEMS]
    assert sum(found) >= 0.9 * len(found)
