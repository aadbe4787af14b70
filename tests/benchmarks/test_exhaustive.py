"""Bounds and proved optima hold in every space, against every plan of tiny problems."""

import pytest

from benchmarks.plans import oracle
from benchmarks.plans.oracle import faster_plan, optimum_below, tiny_problems
from planner import Problem, solve

PROBLEMS = list(tiny_problems(40, seed=1))
SINGLE = [p for p in PROBLEMS if p.job.max_stages_per_device == 1]
SMALL = [p for p in SINGLE if len(p.graph.layers) <= 3 and p.job.microbatches <= 3]
ids = "{0.job.backward}".format


def held(problem: Problem) -> float:
    """Solve; return by how much the plan is above the optimum, which no bound is."""
    result = solve(problem, time_limit_s=2, deterministic=True)
    optimum = optimum_below(problem, result.iteration_time_s)
    assert result.lower_bound_s <= optimum.time_s * (1 + 1e-6)
    over = result.iteration_time_s / optimum.time_s - 1
    if result.status == "optimal":
        assert over <= 2e-4
    return over


@pytest.mark.parametrize("problem", SINGLE[:6], ids=ids)
def test_a_bound_is_never_above_the_best_of_all_plans(problem: Problem) -> None:
    held(problem)


@pytest.mark.parametrize("problem", PROBLEMS[:8], ids=ids)
def test_partitions_refused_without_a_schedule_have_none_in_time(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_s = 1.05 * solve(problem, time_limit_s=0.2, deterministic=True).iteration_time_s
    found = optimum_below(problem, known_s)
    monkeypatch.setattr(oracle, "_is_too_much", lambda *_: False)
    assert optimum_below(problem, known_s) == found


@pytest.mark.parametrize("problem", SMALL[:4], ids=ids)
def test_replays_find_a_plan_that_is_known_to_be_faster(problem: Problem) -> None:
    known_s = solve(problem, time_limit_s=0.5, deterministic=True).iteration_time_s
    faster = faster_plan(problem, 1.02 * known_s)
    assert faster.time_s is not None
    assert faster.time_s >= optimum_below(problem, known_s).time_s
    assert not faster.is_certain or faster.time_s <= known_s * (1 + 1e-6)


@pytest.mark.extensive
def test_nearly_every_best_plan_with_one_stage_a_device_is_found() -> None:
    found = [held(problem) <= 1e-4 for problem in SINGLE]
    assert sum(found) >= 0.9 * len(found)


@pytest.mark.extensive
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p not in SINGLE], ids=ids)
def test_bounds_hold_with_two_stages_a_device(problem: Problem) -> None:
    held(problem)


def test_there_are_spaces_of_every_kind() -> None:
    spaces = {(p.job.backward, p.job.replication, p.job.max_stages_per_device) for p in PROBLEMS}
    assert {backward for backward, _, _ in spaces} == {"whole", "split", "any"}
    assert {True, False} == {replicas for _, replicas, _ in spaces}
    assert {1, 2} == {stages for _, _, stages in spaces}
