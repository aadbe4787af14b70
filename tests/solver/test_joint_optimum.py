"""The solver's proved optimum is the best of all plans, found by trying every one."""

import pytest

from planner import InfeasibleError, solve

CASES = [
    # layers, devices, microbatches, types, replication
    pytest.param(3, 2, 2, 1, True, id="replicas"),
    pytest.param(3, 2, 3, 1, False, id="three microbatches"),
    pytest.param(4, 3, 2, 1, False, id="three devices"),
    pytest.param(3, 2, 2, 2, True, id="mixed devices with replicas"),
    pytest.param(4, 3, 2, 3, False, id="three device types"),
]


@pytest.mark.parametrize(("layers", "devices", "microbatches", "types", "replication"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_proved_optimum_is_the_best_of_all_plans(
    make_tiny_problem, try_every_plan, seed, layers, devices, microbatches, types, replication
):
    problem = make_tiny_problem(
        seed,
        layers=layers,
        devices=devices,
        microbatches=microbatches,
        types=types,
        replication=replication,
    )
    best = try_every_plan(problem)
    assert best.schedules > 10

    result = solve(problem, time_limit_s=30, deterministic=True)

    assert result.status == "optimal"
    assert result.iteration_time_s == pytest.approx(best.time_s, rel=1e-4)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_proved_optimum_respects_tight_memory(make_tiny_problem, try_every_plan, seed):
    problem = make_tiny_problem(
        seed, layers=3, devices=2, microbatches=2, replication=False, memory_mib=170
    )
    best = try_every_plan(problem)
    if best.time_s == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(problem, time_limit_s=10, deterministic=True)
        return
    result = solve(problem, time_limit_s=10, deterministic=True)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_bound_holds_where_optimality_is_not_proved(make_tiny_problem, try_every_plan, seed):
    problem = make_tiny_problem(seed + 50, layers=4, devices=3, microbatches=2, replication=False)
    best = try_every_plan(problem)
    result = solve(problem, time_limit_s=0.05, deterministic=True)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_faster_network_never_worsens_a_proved_optimum(make_tiny_problem, seed):
    settings = {"layers": 4, "devices": 3, "microbatches": 3, "replication": False}
    slow = solve(make_tiny_problem(seed, **settings), time_limit_s=30, deterministic=True)
    fast = solve(
        make_tiny_problem(seed, **settings, link_scale=3.0), time_limit_s=30, deterministic=True
    )
    assert slow.status == fast.status == "optimal"
    assert fast.iteration_time_s <= slow.iteration_time_s * (1 + 1e-4)


def test_deterministic_mode_gives_the_same_plan_twice(make_tiny_problem):
    problem = make_tiny_problem(9, layers=6, devices=4, microbatches=4)
    first, second = (solve(problem, time_limit_s=3, deterministic=True) for _ in range(2))
    assert first.plan == second.plan
