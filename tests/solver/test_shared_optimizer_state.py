"""Replicas that share the optimizer's state: where it is needed, and what a search makes of it."""

from functools import cache

import pytest
from brute_force import brute_force
from tiny_problems import tiny_problem

from planner import InfeasibleError, Problem, solve
from planner.errors import PipeplanError
from planner.job import Job
from planner.search.data_parallel import solve_data_parallel
from planner.variants.problems import with_job
from planner.verification import verify

SEEDS = (1, 2, 5, 6)


def large_state(seed: int, **job: object) -> Problem:
    """Two layers whose state fits a device only in parts, and the whole in no other division."""
    problem = tiny_problem(
        seed,
        layers=2,
        devices=2,
        microbatches=2,
        memory_mib=100,
        cut_mib=4,
        largest_mib=40,
        shard_optimizer=True,
    )
    return with_job(problem, **job)


@cache
def best_s(seed: int, shares: bool) -> float:
    return brute_force(large_state(seed, shard_optimizer=shares)).time_s


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_with_shared_state_are_found_where_they_fit_and_bounded(seed: int) -> None:
    best = best_s(seed, True)
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(large_state(seed), time_limit_s=0.3, deterministic=True)
        return
    result = solve(large_state(seed), time_limit_s=0.3, deterministic=True)
    assert result.iteration_time_s >= best * (1 - 1e-9)
    assert result.lower_bound_s <= best * (1 + 1e-9)
    assert result.plan.job.shard_optimizer is True
    assert verify(result.plan) == []


def test_memory_rules_out_whole_state_in_some_of_these_problems() -> None:
    both = [(best_s(seed, True), best_s(seed, False)) for seed in SEEDS]
    assert any(shared < float("inf") == whole for shared, whole in both), both


@pytest.mark.parametrize("seed", SEEDS)
def test_state_is_shared_only_if_no_plan_fits_without(seed: int) -> None:
    problem = large_state(seed, shard_optimizer="if_needed")
    if best_s(seed, True) == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(problem, time_limit_s=0.3, deterministic=True)
        return
    plan = solve(problem, time_limit_s=0.3, deterministic=True).plan
    assert plan.job.shard_optimizer is (best_s(seed, False) == float("inf"))
    covers = plan.provenance.bound_covers.space
    assert covers is None or covers.shard_optimizer is plan.job.shard_optimizer


def test_sharing_without_replicas_is_refused() -> None:
    fields = {"format": "pipeplan-job/1", "shard_optimizer": True, "replication": False}
    with pytest.raises(PipeplanError, match="set replication = true or shard_optimizer = false"):
        Job.parse(fields, "job.toml")


def test_pipelines_that_do_not_reduce_do_not_share_state() -> None:
    with pytest.raises(PipeplanError, match="shard_optimizer = true: a plan of data-parallel"):
        solve_data_parallel(large_state(0), time_limit_s=0.3)
