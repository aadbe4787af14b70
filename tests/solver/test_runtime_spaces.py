"""Spaces narrowed to a runtime: bounds and plans against every plan there is."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import GIGA, boundary, graph, layer, star
from solver.runtime_brute_force import best_in_space_s
from tiny_problems import renamed, tiny_problem

from planner import InfeasibleError, Problem, solve
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job, Runtime
from planner.plan.operations import one_forward_one_backward
from planner.plan.runtime_rules import RULES, RuntimeBehaviour, RuntimeRules
from planner.plan.runtimes import for_runtime
from planner.prediction import run_by
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders
from planner.variants.problems import with_job
from planner.verification import verify

NAMES = ("embed", "layers.0", "layers.1.attention", "layers.1.mlp", "loss")


def small(runtime: Runtime | RuntimeRules, seed: int, **changes: Any) -> Problem:
    """A tiny problem for a runtime, whole backwards and nothing recomputed."""
    most = changes.get("max_stages")
    changes = {name: value for name, value in changes.items() if name != "max_stages"}
    fields = {"devices": 3, "microbatches": 4, "types": 1 + seed % 2, "backward": "whole"}
    problem = tiny_problem(seed, layers=len(NAMES), **{**fields, **changes})
    return for_runtime(with_job(renamed(problem, NAMES), max_stages=most), runtime)


def own(number: int, **rules: object) -> RuntimeRules:
    """A runtime of one's own that can run what torch can: any order."""
    behaviour = RuntimeBehaviour.model_validate(rules)
    return RuntimeRules(name=f"own {number}", expresses="torch", behaviour=behaviour)


BLOCKING = {"send": "blocking", "receive": "blocking"}
OWN = [
    {"send": "blocking"},
    {"receive": "blocking", "streams": "one"},
    BLOCKING,
    {**BLOCKING, "exchange": "neighbour"},
    {**BLOCKING, "exchange": "together", "message_us": 2e4},
    {**BLOCKING, "exchange": "pairs"},
    {"computation_us": 1e5},
]
PIPELINES = {"devices": 4, "microbatches": 2, "max_stages": 2}
CASES = [
    *(("deepspeed", seed, {}) for seed in range(3)),
    *(("megatron", seed, {"devices": 2, "max_stages_per_device": 2}) for seed in range(3)),
    *(
        ("megatron", seed, {"devices": 2, "memory_mib": 140, "recompute": True})
        for seed in range(3)
    ),
    *(("torch", seed, {"devices": 2, "microbatches": 2}) for seed in range(2)),
    *(("torchtitan", seed, PIPELINES) for seed in (0, 1)),
    *(
        (own(number, **rules), 2 * (number % 2), {"devices": 2, "microbatches": 2})
        for number, rules in enumerate(OWN)
    ),
]


@pytest.mark.parametrize(("runtime", "seed", "changes"), CASES)
def test_plan_and_bound_are_those_of_the_narrow_space(
    runtime: Runtime | RuntimeRules, seed: int, changes: dict[str, Any]
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
    assert verify(result.plan) == []
    if result.status == "optimal":
        assert result.iteration_time_s == pytest.approx(best_s, rel=2e-4)


@pytest.mark.parametrize("seed", range(2))
def test_a_plan_for_a_runtime_is_no_slower_there_than_one_for_another(seed: int) -> None:
    """Both keep to what Megatron-LM can express; the other is for messages that overlap."""
    problem = small("megatron", seed, devices=3)
    overlapped = RULES["megatron"].model_copy(update={"behaviour": RuntimeBehaviour()})
    own, other = (
        solve(for_runtime(problem, rules), time_limit_s=0.3, deterministic=True)
        for rules in (RULES["megatron"], overlapped)
    )
    theirs = run_by(other.plan, RULES["megatron"])
    assert own.plan.runtime == RULES["megatron"]
    assert own.iteration_time_s <= theirs.predicted.iteration_time_s * (1 + 1e-9)
    assert other.iteration_time_s <= own.iteration_time_s * (1 + 1e-9)


def test_plans_for_devices_that_block_are_made_for_them() -> None:
    """Four layers of 1 and 2 s, messages of 2 s: others than where messages overlap."""
    layers = [layer(f"layers.{number}") for number in range(4)]
    cuts = [boundary(f"layers.{n}", f"layers.{n + 1}", bytes_=2 * GIGA) for n in range(3)]
    job = Job(microbatches=8, optimizer="sgd", backward="whole", replication=False)
    problem = Problem(graph(layers, cuts), star(4), job)
    blocking = RuntimeRules(behaviour=RuntimeBehaviour(send="blocking"))
    free, own = (
        solve(replace(problem, runtime=rules), time_limit_s=0.5, deterministic=True)
        for rules in (RuntimeRules(), blocking)
    )
    theirs = run_by(free.plan, blocking)
    assert own.iteration_time_s < theirs.predicted.iteration_time_s


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_the_order_that_membership_asks_for_is_the_published_one(
    count: int, microbatches: int
) -> None:
    problem = tiny_problem(1, layers=4, devices=3, microbatches=microbatches)
    names = list(problem.graph.layers)
    cuts = [round(n * len(names) / count) for n in range(count + 1)]
    stages = [
        StageSpec(tuple(names[a:b]), (device,))
        for (a, b), device in zip(pairwise(cuts), problem.cluster.device_names, strict=False)
    ]
    pipeline = place(problem, stages)
    owner = balanced_assignment(pipeline)
    published = dict(published_orders(pipeline, owner, split=False))["1f1b"]
    for rank, device in enumerate(pipeline.devices):
        own = one_forward_one_backward(rank, count, count, range(microbatches))
        assert own == list(published[device])
