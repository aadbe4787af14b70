"""The solver's proved optimum is the best of all plans, found by trying every one."""

from dataclasses import replace
from functools import cache

import pytest
from brute_force import brute_force
from tiny_problems import seeds, tiny_problem

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
@pytest.mark.parametrize("seed", seeds(1, 2))
def test_proved_optimum_is_the_best_of_all_plans(
    seed, layers, devices, microbatches, types, replication
):
    problem = tiny_problem(
        seed,
        layers=layers,
        devices=devices,
        microbatches=microbatches,
        types=types,
        replication=replication,
    )
    best = brute_force(problem)
    assert best.schedules > 10

    result = solve(problem, time_limit_s=30, deterministic=True)

    assert result.status == "optimal"
    assert result.iteration_time_s == pytest.approx(best.time_s, rel=1e-4)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)


# What else a problem can be; the numbers of layers, devices and microbatches keep it tiny.
KINDS = {
    "tied parameters": (3, 2, 2, {"tied": True}),
    "tied parameters without replicas": (4, 3, 2, {"tied": True, "replication": False}),
    "shared state": (3, 2, 2, {"types": 2, "shard_optimizer": True}),
    "shared state of tied parameters": (3, 2, 2, {"tied": True, "shard_optimizer": True}),
    "a chain of devices": (3, 3, 2, {"topology": "chain", "replication": False}),
    "replicas on a chain of devices": (2, 3, 2, {"topology": "chain"}),
    "links that transfers share": (4, 3, 2, {"topology": "switches", "replication": False}),
    "replicas behind switches": (2, 3, 2, {"topology": "switches"}),
    "two stages a device": (3, 2, 2, {"replication": False, "max_stages_per_device": 2}),
    "two stages a device with ties": (
        *(3, 2, 2),
        {"replication": False, "max_stages_per_device": 2, "tied": True},
    ),
}


@pytest.mark.extensive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_bound_and_plan_enclose_the_best_of_all_plans(seed, kind):
    layers, devices, microbatches, settings = KINDS[kind]
    problem = tiny_problem(
        seed, layers=layers, devices=devices, microbatches=microbatches, **settings
    )
    best = brute_force(problem)
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)
    if result.status == "optimal":
        assert result.iteration_time_s <= best.time_s * (1 + 1e-4)


def large_cuts(seed, memory_mib):
    """Large cuts leave room for few microbatches in flight, for one only, or for none."""
    return tiny_problem(
        seed,
        layers=3,
        devices=2,
        microbatches=2,
        replication=False,
        memory_mib=memory_mib,
        cut_mib=30,
    )


@cache
def best_with_large_cuts_s(seed, memory_mib):
    return brute_force(large_cuts(seed, memory_mib)).time_s


@pytest.mark.parametrize("seed", range(12))
def test_where_memory_binds_a_plan_is_found_if_there_is_one(seed):
    problem = large_cuts(seed, memory_mib=170)
    best_s = best_with_large_cuts_s(seed, 170)
    if best_s == float("inf"):
        with pytest.raises(InfeasibleError, match=r"no plan fits|alone needs"):
            solve(problem, time_limit_s=0.3, deterministic=True)
        return
    result = solve(problem, time_limit_s=0.3, deterministic=True)
    assert result.iteration_time_s >= best_s * (1 - 1e-9)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)


def test_memory_binds_in_some_of_these_problems_and_rules_out_others():
    tight, ample = (
        [best_with_large_cuts_s(seed, memory_mib) for seed in range(12)]
        for memory_mib in (170, 1000)
    )
    slower = [t > a for t, a in zip(tight, ample, strict=True)]
    assert sum(slower) >= 3
    assert float("inf") in tight


@pytest.mark.parametrize("seed", range(2))
def test_bound_holds_after_no_time_at_all(seed):
    problem = tiny_problem(seed, layers=4, devices=3, microbatches=2, types=2, replication=False)
    best = brute_force(problem)
    result = solve(problem, time_limit_s=0.001, deterministic=True)
    assert result.lower_bound_s <= best.time_s * (1 + 1e-9)
    assert result.iteration_time_s >= best.time_s * (1 - 1e-9)
    if result.status == "optimal":
        assert result.iteration_time_s <= best.time_s * (1 + 1e-4)


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(2))
def test_a_faster_network_never_worsens_a_proved_optimum(seed):
    settings = {"layers": 4, "devices": 3, "microbatches": 3, "replication": False}
    slow = solve(tiny_problem(seed, **settings), time_limit_s=30, deterministic=True)
    fast = solve(
        tiny_problem(seed, **settings, link_scale=3.0), time_limit_s=30, deterministic=True
    )
    assert slow.status == fast.status == "optimal"
    assert fast.iteration_time_s <= slow.iteration_time_s * (1 + 1e-4)


def test_deterministic_mode_gives_the_same_plan_twice():
    problem = tiny_problem(9, layers=6, devices=4, microbatches=4)
    first, second = (solve(problem, time_limit_s=0.2, deterministic=True) for _ in range(2))
    assert first.plan == second.plan


@pytest.mark.parametrize("max_stages", [1, 2, 3])
def test_stages_on_shared_devices_keep_to_the_jobs_limit(max_stages):
    problem = tiny_problem(
        1, layers=6, devices=3, microbatches=3, replication=False, max_stages_per_device=2
    )
    job = problem.job.model_copy(update={"max_stages": max_stages})
    result = solve(replace(problem, job=job), time_limit_s=0.5, deterministic=True)
    assert len(result.plan.stages) <= max_stages
