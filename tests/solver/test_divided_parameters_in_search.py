"""Replicas that divide weights and gradients: where memory needs it, and what a search finds."""

from functools import cache

import pytest
from brute_force import brute_force
from builders import orders
from tiny_problems import tiny_problem

from planner import InfeasibleError, Problem, solve
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.job import Job
from planner.simulation.simulator import simulate
from planner.space import WITH_SHARDED_PARAMETERS
from planner.variants.problems import with_job, with_memory
from planner.verification import verify

SEEDS = (1, 2)
DIVIDED = {"shard_parameters": True, **WITH_SHARDED_PARAMETERS}


@cache
def brute_force_s(seed: int, types: int, tied: bool) -> float:
    return brute_force(few_layers(seed, types, tied=tied)).time_s


def few_layers(seed: int, types: int = 1, *, tied: bool = False) -> Problem:
    problem = tiny_problem(
        seed, layers=3, devices=2, microbatches=2, types=types, tied=tied, link_scale=20
    )
    return with_job(problem, **DIVIDED)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("types", "tied"), [(1, False), (2, False), (1, True)])
def test_the_best_plan_is_found_and_bounded(seed: int, types: int, tied: bool) -> None:
    best_s = brute_force_s(seed, types, tied)
    result = solve(few_layers(seed, types, tied=tied), time_limit_s=0.5, deterministic=True)
    assert result.iteration_time_s == pytest.approx(best_s, rel=1e-6)
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    assert verify(result.plan) == []


def one_stage(seed: int, **job: object) -> Problem:
    """Six layers that no plan cuts, on one device or two."""
    problem = tiny_problem(
        seed, layers=6, devices=2, microbatches=2, memory_mib=4096, largest_mib=40
    )
    return with_job(problem, max_stages=1, **job)


def needed_bytes(seed: int, **job: object) -> int:
    """What two replicas need."""
    problem = one_stage(seed, **job)
    placed = place(problem, [StageSpec(tuple(problem.graph.layers), ("d0", "d1"))])
    timeline = simulate(placed, orders(d0="0F0 0B0", d1="0F1 0B1"))
    return max(timeline.peak_memory_bytes.values())


def in_memory(seed: int, *fields: dict, **job: object) -> Problem:
    """A problem with memory between what two jobs need."""
    least, most = (needed_bytes(seed, **row) for row in fields)
    assert least < most
    problem = one_stage(seed, **job)
    kinds = dict.fromkeys(problem.cluster.device_types, (least + most) / 2 / 2**30)
    return with_memory(problem, kinds)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_divided_only_if_no_plan_fits_without(seed: int) -> None:
    state = {"shard_optimizer": True}
    open_ = {"shard_optimizer": "if_needed", "shard_parameters": "if_needed"}
    tight = in_memory(seed, DIVIDED, state, **open_)
    plan = solve(tight, time_limit_s=0.3, deterministic=True).plan
    assert (plan.job.shard_parameters, plan.job.shard_optimizer) == (True, False)
    assert plan.job.shards_state
    assert verify(plan) == []
    roomier = in_memory(seed, state, {}, **open_)
    plan = solve(roomier, time_limit_s=0.3, deterministic=True).plan
    assert (plan.job.shard_parameters, plan.job.shard_optimizer) == (False, True)


def test_the_error_names_what_makes_a_plan_fit() -> None:
    problem = in_memory(1, DIVIDED, {"shard_optimizer": True})
    told = "with shard_parameters = true, equal_pipelines = true a plan of"
    with pytest.raises(InfeasibleError) as raised:
        solve(problem, time_limit_s=0.3, deterministic=True)
    assert told in str(raised.value)
    assert "shard_optimizer = true a plan" not in str(raised.value)


@pytest.mark.parametrize("settings", [{"robust": True}, {"prefer": "simple"}])
def test_plans_are_also_chosen_by_more_than_time(settings: dict) -> None:
    result = solve(few_layers(1), time_limit_s=0.3, deterministic=True, **settings)
    assert verify(result.plan) == []
    assert result.plan.job.shard_parameters is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, 'set equal_pipelines = true and backward = "whole"'),
        ({**WITH_SHARDED_PARAMETERS, "replication": False}, "set replication = true or"),
        ({**WITH_SHARDED_PARAMETERS, "tensor_parallel": 2}, "set tensor_parallel = 1 or"),
        ({**WITH_SHARDED_PARAMETERS, "offload": True}, "set offload = false or"),
        ({"shard_parameters": "if_needed", "backward": "split"}, 'set backward = "any" or'),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        Job.parse({"format": "pipeplan-job/1", "shard_parameters": True, **fields}, "job.toml")
