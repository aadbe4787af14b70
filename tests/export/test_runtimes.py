"""Plans made for a runtime: whatever is planned for it, its exporter takes."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tiny_problems import renamed, tiny_problem

from planner import (
    InfeasibleError,
    LayerGraph,
    PipeplanError,
    Plan,
    Problem,
    export_plan,
    solve,
    verify,
)
from planner.job import Runtime
from planner.plan.membership import outside
from planner.plan.runtimes import EXPORTS, RUNTIMES, for_runtime, rules_of
from planner.variants.problems import with_job

NAMES = (
    "embed",
    "layers.0.attention",
    "layers.0.mlp",
    "layers.1.attention",
    "layers.1.mlp",
    "layers.2.attention",
    "layers.2.mlp",
    "norm",
    "loss",
)
"""Blocks of two layers, as a transformer has them."""


def named_problem(seed: int, **changes: object) -> Problem:
    """A tiny problem with the layers of a transformer, and the runtime's freedoms drawn."""
    rng = random.Random(seed)
    drawn = {
        "devices": rng.randint(1, 4),
        "microbatches": rng.choice((2, 4, 6)),
        "types": rng.randint(1, 2),
        "topology": rng.choice(("mesh", "switches")),
        "max_stages_per_device": rng.choice((1, 2)),
        "tied": rng.random() < 0.3,
        "backward": "any",
        "recompute": True,
        **changes,
    }
    problem = renamed(tiny_problem(seed, layers=len(NAMES), **drawn), NAMES)
    data = problem.graph.record.model_dump(mode="json")
    if rng.random() < 0.3:
        first = rng.randrange(1, len(NAMES) - 3)
        skip = dict(data["boundaries"][first], name="skip", users=[NAMES[first + 2]])
        data["boundaries"].append(skip | {"saved_by": None})
    return replace(problem, graph=LayerGraph.parse(data))


def planned_for(runtime: Runtime, seed: int) -> Plan | None:
    """A plan for a runtime; None if nothing fits or the runtime has no form of such a model."""
    problem = named_problem(seed)
    job = problem.job.model_copy(update={"runtime": runtime})
    try:
        result = solve(replace(problem, job=job), time_limit_s=0.3, deterministic=True)
    except InfeasibleError:
        return None
    return result.plan


def require_exported_as_planned(runtime: Runtime, plan: Plan) -> None:
    """The plan is valid and in its space, and its export runs the same order and recomputation."""
    assert plan.job.runtime == runtime
    assert verify(plan) == []
    space = plan.provenance.bound_covers.space
    assert space is not None
    assert not [*outside(space, plan.stages, plan.parsed_orders(), plan.layers)]
    if runtime == "pipeplan":
        return
    notes = export_plan(plan, EXPORTS[runtime]).notes
    assert not [note for note in notes if "predicted instead of" in note]


SEEDS = (0, 8)
"""Of four and of two devices."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_planned_for_a_runtime_is_exported_to_it_as_planned(
    runtime: Runtime, seed: int
) -> None:
    plan = planned_for(runtime, seed)
    assert plan is not None
    require_exported_as_planned(runtime, plan)


@pytest.mark.extensive
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_many_plans_for_a_runtime_are_exported_to_it_as_planned(runtime: Runtime) -> None:
    plans = [plan for seed in range(20, 28) if (plan := planned_for(runtime, seed)) is not None]
    for plan in plans:
        require_exported_as_planned(runtime, plan)
    assert len(plans) >= 3


def test_narrowing_twice_is_narrowing_once() -> None:
    for runtime in RUNTIMES:
        narrow = for_runtime(named_problem(4), runtime)
        assert for_runtime(narrow) == narrow


def test_a_runtime_narrows_what_the_job_allows_and_nothing_else() -> None:
    problem = named_problem(0, max_stages_per_device=2)
    assert for_runtime(problem, "pipeplan").job.space == problem.job.space
    deepspeed = for_runtime(problem, "deepspeed").job
    assert (deepspeed.order, deepspeed.backward) == ("1f1b", "whole")
    assert deepspeed.equal_pipelines
    assert deepspeed.max_stages_per_device == 1
    assert deepspeed.recompute
    torch = for_runtime(problem, "torch").job
    assert (torch.replication, torch.recompute, torch.order) == (False, False, "any")
    assert torch.cuts == NAMES[1:-1]


def test_megatron_cuts_between_whole_blocks_only() -> None:
    job = for_runtime(named_problem(0), "megatron").job
    assert job.cuts == ("layers.0.attention", "layers.1.attention", "layers.2.attention", "norm")


def test_the_cuts_of_a_job_stay_where_a_runtime_allows_more() -> None:
    problem = named_problem(0)
    own = problem.job.model_copy(update={"cuts": ("layers.0.mlp", "layers.1.attention")})
    assert for_runtime(replace(problem, job=own), "megatron").job.cuts == ("layers.1.attention",)


WRONG = [
    (
        "torchtitan",
        {"precision": "float64"},
        r"job\.precision: 'float64', but torchtitan trains in",
    ),
    ("deepspeed", {"backward": "split"}, r'job\.backward: "split", but deepspeed runs whole'),
]


@pytest.mark.parametrize(("runtime", "changes", "said"), WRONG)
def test_a_job_that_a_runtime_cannot_run_is_refused(
    runtime: Runtime, changes: dict[str, Any], said: str
) -> None:
    problem = named_problem(0)
    if "precision" in changes:
        record = problem.graph.record.model_copy(update=changes)
        problem = replace(
            problem,
            graph=LayerGraph.from_record(record),
            job=problem.job.model_copy(update=changes),
        )
    with pytest.raises(PipeplanError, match=said):
        for_runtime(with_job(problem, **changes), runtime)


def test_unknown_runtimes_list_the_known_ones() -> None:
    with pytest.raises(PipeplanError, match="'jax' is unknown; choose from pipeplan, torch, "):
        rules_of("jax")


def test_a_plan_of_a_runtime_that_cannot_run_its_space_is_refused() -> None:
    plan = planned_for("deepspeed", 4)
    assert plan is not None
    wider = plan.job.model_copy(update={"order": "any"})
    (problem, *_) = verify(plan.model_copy(update={"job": wider}))
    assert problem.startswith("job.order: gives more than deepspeed can run; plan again with")


def test_an_edit_of_the_order_leaves_the_space_of_the_bound() -> None:
    plan = planned_for("deepspeed", 8)
    assert plan is not None
    assert len(plan.stages) > 1
    device = plan.stages[0].devices[0]
    kept = sorted(plan.orders[device].split(), key=lambda word: "B" in word)
    edited = plan.model_copy(update={"orders": {**plan.orders, device: " ".join(kept)}})
    (found,) = outside(plan.job.space, edited.stages, edited.parsed_orders(), edited.layers)
    assert found.freedom == "order"
    assert "another order than 1F1B" in found.in_bound()


def short_of_memory() -> Problem:
    """A problem that fits its two devices only if layers are recomputed."""
    fields = {"devices": 2, "microbatches": 4, "types": 1, "topology": "mesh", "tied": False}
    return named_problem(8, memory_mib=200, **fields)


def test_megatron_recomputes_as_many_first_blocks_in_every_stage_as_planned() -> None:
    tight = short_of_memory()
    result = solve(for_runtime(tight, "megatron"), time_limit_s=0.2, deterministic=True)
    assert any(stage.recompute for stage in result.plan.stages)
    require_exported_as_planned("megatron", result.plan)
    files = export_plan(result.plan, "megatron")
    assert "--recompute-granularity full" in files.files["megatron.sh"]
    assert not [note for note in files.notes if note.startswith("Megatron recomputes")]


def test_other_layers_than_the_first_blocks_lie_outside() -> None:
    tight = short_of_memory()
    plan = solve(for_runtime(tight, "megatron"), time_limit_s=0.2, deterministic=True).plan
    stage = max(plan.stages, key=lambda stage: len(stage.recompute))
    fewer = stage.model_copy(update={"recompute": stage.recompute[1:]})
    stages = [fewer if row.index == stage.index else row for row in plan.stages]
    (found,) = outside(plan.job.space, stages, {}, plan.layers)
    assert (found.freedom, found.allowed) == ("recompute", '"blocks"')
