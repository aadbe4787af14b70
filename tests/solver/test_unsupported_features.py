"""Jobs with features that something does not take yet are refused by name, with the remedy."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from builders import graph, layer, parameter, star
from measured_runs import run_of
from unequal_graphs import SHARES, TOKENS, unequal

from executor.launch.config import TrainingConfig
from executor.launch.refusals import require_possible
from executor.launch.run import RunSettings
from planner import Job, Problem, calibrate, replan, solve
from planner.analysis.comparison import compare
from planner.errors import PipeplanError
from planner.interop.exported import TARGETS, export_plan
from planner.plan.plan import Plan, Sync
from planner.plan.runtimes import for_runtime
from planner.plan.unsupported import FEATURES, require_decided, require_without
from planner.search.data_parallel import solve_data_parallel
from planner.space import WITH_SHARDED_PARAMETERS
from planner.sync.simulation.planned import from_plan

WORDS = {
    "tensor_parallel": "tensor_parallel = 2: {} supports single .* with tensor_parallel = 1",
    "shard_optimizer": "shard_optimizer = true: {} supports .* with shard_optimizer = false",
    "shard_parameters": "shard_parameters = true: {} supports .* with shard_parameters = false",
    "offload": "offload = true: {} supports .* with offload = false",
    "recompute_attention": "recompute_attention = true: {} supports .*recompute_attention = false",
    "expert_parallel": "expert_parallel = true: {} supports .* with expert_parallel = false",
    "lengths": "lengths: microbatches of 3 lengths, but {} supports one .* without lengths",
}
VALUES: dict[str, Any] = {
    "tensor_parallel": 2,
    "shard_optimizer": True,
    "shard_parameters": True,
    "offload": True,
    "recompute_attention": True,
    "expert_parallel": True,
    "lengths": {"tokens": TOKENS, "shares": SHARES},
}


@cache
def planned(feature: str) -> Plan:
    """A plan of two layers whose job has a feature, or none; its stages need not use it."""
    times = [(1.0, 2.0), (2.0, 4.0), (4.0, 8.0)]
    has_lengths = feature == "lengths"
    plain = graph([layer("l0", parameters=["w"]), layer("l1")], parameters=[parameter("w")])
    the_graph = unequal([times, times], [0.1, 0.2, 0.4]) if has_lengths else plain
    asked = {"microbatches": 2, "optimizer": "sgd"}
    job = Job.model_validate(asked | ({"lengths": VALUES["lengths"]} if has_lengths else {}))
    plan = solve(Problem(the_graph, star(2), job), time_limit_s=0.2, deterministic=True).plan
    if feature not in VALUES or has_lengths:
        return plan
    asked |= {feature: VALUES[feature]}
    if feature == "expert_parallel":
        asked |= {"tensor_parallel": 2}  # Without groups there are no experts to give out.
    asked |= dict(WITH_SHARDED_PARAMETERS) if feature == "shard_parameters" else {}
    return plan.model_copy(update={"job": Job.model_validate(asked)})


def problem(feature: str) -> Problem:
    plan = planned(feature)
    return Problem(plan.problem.graph, plan.cluster, plan.job)


WITH_PLAN: dict[str, Callable[[Plan], object]] = {
    "replan": lambda plan: replan(plan, lost=["d1"]),
    "calibrate": lambda plan: calibrate(plan, run_of(planned("none"))),
    "simulate --sync": from_plan,
    **{f"export --to {name}": lambda plan, name=name: export_plan(plan, name) for name in TARGETS},
}
WITH_PROBLEM: dict[str, Callable[[Problem], object]] = {
    "a plan of data-parallel pipelines": solve_data_parallel,
    "a plan for torch": lambda problem: for_runtime(problem, "torch"),
    "a plan for deepspeed": lambda problem: for_runtime(problem, "deepspeed"),
    "compare": lambda problem: compare(problem, time_limit_s=0.2),
    "robust = True": lambda problem: solve(problem, robust=True),
    'prefer = "simple"': lambda problem: solve(problem, prefer="simple"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_field_its_value_and_the_remedy_are_named(feature: str) -> None:
    job = planned(feature).job
    with pytest.raises(PipeplanError, match=WORDS[feature].format("this")):
        require_without(job, "this")
    others = [name for name in FEATURES if name != feature]
    if feature == "expert_parallel":
        others.remove("tensor_parallel")
    require_without(job, "this", others)
    require_without(planned("none").job, "this")


def test_every_feature_is_named_at_once() -> None:
    # The fields exclude one another in a job that is checked.
    values = {**VALUES, "tensor_parallel": 1, "lengths": planned("lengths").job.lengths}
    with pytest.raises(PipeplanError) as raised:
        require_without(Job().model_copy(update=values), "this", degree=2)
    assert [problem.split()[0] for problem in raised.value.problems] == [*FEATURES[:-1], "lengths:"]


@pytest.mark.parametrize("name", ["shard_optimizer", "shard_parameters", "offload"])
def test_what_is_left_open_is_refused(name: str) -> None:
    with pytest.raises(PipeplanError, match=f'{name} = "if_needed": this does not decide that'):
        require_decided(Job.model_validate({name: "if_needed"}), "this")


def test_whole_experts_are_not_exported() -> None:
    with pytest.raises(
        PipeplanError, match=WORDS["expert_parallel"].format("export --to megatron")
    ):
        WITH_PLAN["export --to megatron"](planned("expert_parallel"))


@pytest.mark.parametrize("feature", ["shard_parameters", "offload", "lengths"])
@pytest.mark.parametrize("what", [name for name in WITH_PLAN if name != "simulate --sync"])
def test_plans_are_refused(what: str, feature: str) -> None:
    if (what, feature) == ("export --to torchtitan", "shard_parameters"):
        return  # It is FSDP there, without a pipeline.
    with pytest.raises(PipeplanError, match=WORDS[feature].format(what)):
        WITH_PLAN[what](planned(feature))


@pytest.mark.parametrize("what", [name for name in WITH_PROBLEM if name != "compare"])
@pytest.mark.parametrize("feature", ["offload", "lengths"])
def test_problems_are_refused(what: str, feature: str) -> None:
    with pytest.raises(PipeplanError, match=WORDS[feature].format(what)):
        WITH_PROBLEM[what](problem(feature))


@pytest.mark.parametrize(
    "what",
    ["a plan of data-parallel pipelines", "a plan for torch", "a plan for deepspeed", "compare"],
)
def test_divided_weights_are_refused(what: str) -> None:
    with pytest.raises(PipeplanError, match=WORDS["shard_parameters"].format(what)):
        WITH_PROBLEM[what](problem("shard_parameters"))


def test_recomputed_attention_is_not_trained_beside_offloaded_stashes() -> None:
    plan = planned("recompute_attention")
    require_possible(plan, RunSettings(), TrainingConfig())
    stages = [stage.model_copy(update={"offload": stage.layers}) for stage in plan.stages]
    told = WORDS["recompute_attention"].format("training with offloaded stashes")
    with pytest.raises(PipeplanError, match=told):
        require_possible(
            plan.model_copy(update={"stages": stages}), RunSettings(), TrainingConfig()
        )


def test_what_takes_lengths_but_no_offload_says_so() -> None:
    with pytest.raises(PipeplanError, match=WORDS["offload"].format("compare")):
        WITH_PROBLEM["compare"](problem("offload"))
    with pytest.raises(PipeplanError, match=WORDS["lengths"].format("simulate --sync")):
        WITH_PLAN["simulate --sync"](planned("lengths"))


@pytest.mark.parametrize(
    ("what", "fields", "sync", "emulated"),
    [
        ("--emulate", {}, "all_reduce", True),
        ("--emulate-speed", {"pace": object()}, "all_reduce", False),
        ("sync.strategy = ad_psgd", {}, "ad_psgd", False),
    ],
)
def test_ranks_refuse_what_they_do_not_do_yet(
    what: str, fields: dict, sync: str, emulated: bool
) -> None:
    plan = planned("lengths").model_copy(update={"sync": Sync(strategy=sync)})
    config = None if emulated else TrainingConfig()
    with pytest.raises(PipeplanError, match=WORDS["lengths"].format(what)):
        require_possible(plan, RunSettings(**fields), config)
    if sync == "all_reduce":
        with pytest.raises(PipeplanError, match=WORDS["shard_parameters"].format(what)):
            require_possible(planned("shard_parameters"), RunSettings(**fields), config)
