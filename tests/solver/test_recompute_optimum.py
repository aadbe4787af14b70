"""Plans that recompute, against every partition with every recomputation and every schedule."""

from dataclasses import replace

import pytest
from brute_force import brute_force
from tiny_problems import tiny_problem

from planner import InfeasibleError, Problem, solve, verify
from planner.simulator import simulate_plan


def tight(seed: int, memory_mib: float, **settings: object) -> Problem:
    settings = {"layers": 3, "devices": 2, "microbatches": 2, "replication": False, **settings}
    return tiny_problem(seed, memory_mib=memory_mib, recompute=True, **settings)


def without_recompute(problem: Problem) -> Problem:
    return replace(problem, job=problem.job.model_copy(update={"recompute": False}))


SETTINGS = {
    "one device a stage": {},
    "replicas": {"layers": 2, "replication": True},
    "three devices": {"devices": 3, "microbatches": 1},
    "two types": {"types": 2},
    "two stages a device": {"layers": 2, "max_stages_per_device": 2},
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("memory_mib", [70, 90, 120])
@pytest.mark.parametrize("seed", range(4))
def test_plan_and_bound_enclose_the_best_of_all_plans_that_recompute(
    seed: int, memory_mib: float, kind: str
) -> None:
    problem = tight(seed, memory_mib, **SETTINGS[kind])
    best = brute_force(problem)
    if best.time_s == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(problem, time_limit_s=1, deterministic=True)
        return
    result = solve(problem, time_limit_s=1, deterministic=True)
    assert verify(result.plan) == []
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)
    if result.status == "optimal":
        assert result.iteration_time_s <= best.time_s * (1 + 1e-4)


def test_recomputing_matters_in_these_problems() -> None:
    """Some have no plan without, some have a faster one with it, some need none."""
    found = []
    for seed in range(4):
        for memory_mib in (70, 90, 120):
            problem = tight(seed, memory_mib)
            free, none = brute_force(problem), brute_force(without_recompute(problem))
            found.append((free.time_s, none.time_s))
    assert any(none == float("inf") > free for free, none in found)
    assert any(free < none < float("inf") for free, none in found)
    assert any(free == none < float("inf") for free, none in found)


@pytest.mark.parametrize("seed", range(4))
def test_what_fits_only_with_recomputation_is_planned_and_keeps_within_memory(seed: int) -> None:
    problem = tight(seed, 100, layers=8, devices=3, microbatches=6)
    with pytest.raises(InfeasibleError):
        solve(without_recompute(problem), time_limit_s=1, deterministic=True)
    plan = solve(problem, time_limit_s=1, deterministic=True).plan
    assert any(stage.recompute for stage in plan.stages)
    timeline = simulate_plan(plan)
    for device, peak in timeline.peak_memory_bytes.items():
        assert peak <= timeline.pipeline.capacity_bytes(device)
