"""Steps of a search can be left out by name, to see what each of them finds."""

import pytest
from tiny_problems import tiny_problem

from planner import PipeplanError, solve, verify
from planner.search.settings import STEPS


@pytest.mark.parametrize("step", [name for name in STEPS if name != "walk"])
def test_without_a_step_plans_are_valid_and_no_better(step: str) -> None:
    problem = tiny_problem(0, layers=4, devices=3, microbatches=4)
    whole = solve(problem, time_limit_s=0.5, deterministic=True)
    found = solve(problem, time_limit_s=0.5, deterministic=True, without_steps=[step])
    assert verify(found.plan) == []
    assert found.iteration_time_s >= whole.lower_bound_s * (1 - 1e-9)
    assert found.lower_bound_s <= whole.iteration_time_s * (1 + 1e-9)


def test_without_proofs_nothing_is_proved() -> None:
    problem = tiny_problem(0, layers=4, devices=3, microbatches=4)
    steps = ["bound", "prove", "decide"]
    found = solve(problem, time_limit_s=0.2, deterministic=True, without_steps=steps)
    assert found.lower_bound_s == 0
    assert found.plan.proof is None


def test_names_of_no_step_are_refused_with_the_names_there_are() -> None:
    problem = tiny_problem(0, layers=3, devices=2, microbatches=2)
    with pytest.raises(PipeplanError, match=r"no step is named 'baseline'.*walk"):
        solve(problem, time_limit_s=1, without_steps=["baseline"])
