"""Spaces narrowed to a runtime: bounds and plans against every plan there is."""

import math
from typing import Any

import pytest
from solver.runtime_brute_force import best_in_space_s
from solver.tiny_problems import renamed, tiny_problem

from planner import InfeasibleError, Problem, solve
from planner.costs.placement import place
from planner.job import Runtime
from planner.plan.operations import one_forward_one_backward
from planner.plan.runtimes import for_runtime
from planner.search.partition.candidates import even_partition
from planner.search.partition.chain import Chain
from planner.search.schedule import classics
from planner.search.schedule.assignment import balanced_assignment
from planner.variants.problems import with_job

NAMES = ("embed", "layers.0", "layers.1.attention", "layers.1.mlp", "loss")


def small(runtime: Runtime, seed: int, **changes: Any) -> Problem:
    """A tiny problem for a runtime, whole backwards and nothing recomputed."""
    most = changes.get("max_stages")
    changes = {name: value for name, value in changes.items() if name != "max_stages"}
    fields = {"devices": 3, "microbatches": 4, "types": 1 + seed % 2, "backward": "whole"}
    problem = tiny_problem(seed, layers=len(NAMES), **{**fields, **changes})
    return for_runtime(with_job(renamed(problem, NAMES), max_stages=most), runtime)


PIPELINES = {"devices": 4, "microbatches": 2, "max_stages": 2}
CASES = [
    *(("deepspeed", seed, {}) for seed in range(6)),
    *(("megatron", seed, {"devices": 2, "max_stages_per_device": 2}) for seed in range(6)),
    *(
        ("megatron", seed, {"devices": 2, "memory_mib": 140, "recompute": True})
        for seed in range(5)
    ),
    *(("torch", seed, {"devices": 2, "microbatches": 2}) for seed in range(3)),
    *(("torchtitan", seed, PIPELINES) for seed in (0, 1)),
]


@pytest.mark.parametrize(("runtime", "seed", "changes"), CASES)
def test_plan_and_bound_are_those_of_the_narrow_space(
    runtime: Runtime, seed: int, changes: dict[str, Any]
) -> None:
    problem = small(runtime, seed, **changes)
    best_s = best_in_space_s(problem)
    try:
        result = solve(problem, time_limit_s=0.3, deterministic=True)
    except InfeasibleError:
        assert math.isinf(best_s)
        return
    assert result.lower_bound_s <= best_s * (1 + 1e-9)
    assert best_s <= result.iteration_time_s * (1 + 1e-9)
    if result.status == "optimal":
        assert result.iteration_time_s == pytest.approx(best_s, rel=2e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_the_order_that_membership_asks_for_is_the_published_one(
    count: int, microbatches: int
) -> None:
    problem = tiny_problem(1, layers=4, devices=3, microbatches=microbatches)
    chain = Chain(problem)
    pipeline = place(problem, chain.specs(even_partition(chain, count)))
    published = classics.one_forward_one_backward(pipeline, balanced_assignment(pipeline))
    for rank, device in enumerate(pipeline.devices):
        own = one_forward_one_backward(rank, count, count, range(microbatches))
        assert own == list(published[device])
