"""Strategies that are exact: whatever the plan, they train what plain torch trains."""

import math
from collections.abc import Callable

import pytest
from executor_plans import by_counts, pipeline_of, scheduled, shuffled, traced, zoo_pipeline
from plain_torch import Alone, worst_error
from run_files import RunFiles

from models import ZOO
from planner.plan.plan import Plan

pytestmark = pytest.mark.extensive
STEPS, RANKS = 5, 3
DOUBLE = {"precision": "float64"}
CLIPPED = "clip_norm = 0.3\n[schedule]\nkind = 'linear'\nwarmup_steps = 2\n"
SMALL = "bucket_mib=0.05"  # Some buckets a stage.
STRATEGIES = {
    "overlapped": f"all_reduce:{SMALL}",
    "whole": "all_reduce:overlap=false",
    "fused": "fused:fusion_mib=0.1",
    "decoupled": f"decoupled:{SMALL}",
}


def gpt(stages: list[str], cuts: list[int], microbatches: int, **job: object):
    graph = traced("gpt_tiny", "float64")
    layers = list(graph.layers)
    bounds = [0, *cuts, len(layers)]
    rows = [(layers[a:b], on.split()) for a, b, on in zip(bounds, bounds[1:], stages, strict=False)]
    fields = {**DOUBLE, "microbatches": microbatches, **job}
    return pipeline_of(graph, ZOO["gpt_tiny"], rows, **fields)


def tied_and_uneven() -> Plan:
    pipeline = gpt(["d0", "d1 d2", "d0"], [3, 6], 4, optimizer="adamw", learning_rate=0.003)
    owners = {(stage, m): "d0" for stage in (0, 2) for m in range(4)}
    return shuffled(pipeline, 1, {**owners, **by_counts(1, {"d1": 1, "d2": 3})})


def replicas_that_overlap() -> Plan:
    pipeline = gpt(["d0 d1", "d1 d2", "d2 d0"], [3, 5], 5, learning_rate=0.05)
    return shuffled(pipeline, 4, split=0.5)


def a_replica_without_a_microbatch() -> Plan:
    pipeline = gpt(["d0 d1 d2", "d1"], [6], 2, optimizer="adamw", learning_rate=0.003)
    owners = {(0, 0): "d0", (0, 1): "d1", (1, 0): "d1", (1, 1): "d1"}
    return shuffled(pipeline, 2, owners)


PLANS: dict[str, Callable[[], Plan]] = {
    plan.__name__: plan
    for plan in (
        tied_and_uneven,
        replicas_that_overlap,
        a_replica_without_a_microbatch,
    )
}


def half_precision() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [3], ["d0 d1", "d2"], 4, precision="float16"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    for name, build in PLANS.items():
        plan = build()
        for key, sync in STRATEGIES.items():
            found.add(f"{name}.{key}", plan, CLIPPED, sync=sync)
    plan = tied_and_uneven()
    found.add("again.1", plan, every=2, sync="decoupled")
    first = found.checkpoints("again.1") / "step-00000002"
    found.add("again.2", plan, sync="decoupled", resume=str(first))
    for key in ("overlapped", "decoupled"):
        scale = "[loss_scale]\ninitial = 1048576.0\n"
        found.add(f"half.{key}", half_precision(), scale, sync=STRATEGIES[key])
    chain = scheduled(zoo_pipeline("llama_tiny", [2, 4], ["d0", "d1", "d2"], 4))
    for approximation in ("own_gradient", "last_update"):
        sync = f"cross_iteration:approximation={approximation}"
        found.add(f"chain.{approximation}", chain, CLIPPED, sync=sync)
    found.add("chain.exact", chain, CLIPPED)
    found.launch(RANKS)
    return found


@pytest.mark.parametrize("key", STRATEGIES)
@pytest.mark.parametrize("name", PLANS)
def test_parameters_are_those_of_plain_torch(runs: RunFiles, name: str, key: str) -> None:
    run = f"{name}.{key}"
    alone = Alone(PLANS[name](), runs.config(run))
    losses = alone.train(STEPS)
    assert runs.losses(run) == pytest.approx(losses, rel=1e-10)
    assert worst_error(runs.parameters(run), alone.parameters()) < 1e-9
    norms = [metrics["gradient_norm"] for metrics in runs.history(run)]
    assert norms == pytest.approx([m["gradient_norm"] for m in runs.history(f"{name}.whole")])


def test_pending_steps_are_made_before_a_checkpoint(runs: RunFiles) -> None:
    assert runs.losses("again.2") == runs.losses("again.1")[2:]
    expected = runs.parameters("again.1")
    for name, parameter in runs.parameters("again.2").items():
        assert parameter.equal(expected[name]), name


def test_decoupled_skips_the_steps_that_overflow(runs: RunFiles) -> None:
    exact, decoupled = runs.history("half.overlapped"), runs.history("half.decoupled")
    assert [m["skipped"] for m in decoupled] == [m["skipped"] for m in exact]
    assert decoupled[0]["skipped"]
    assert not decoupled[-1]["skipped"]
    assert runs.losses("half.decoupled") == pytest.approx(runs.losses("half.overlapped"), rel=0.01)


@pytest.mark.parametrize("approximation", ["own_gradient", "last_update"])
def test_cross_iteration_of_a_plan_that_shares_nothing_is_exact(
    runs: RunFiles, approximation: str
) -> None:
    name = f"chain.{approximation}"
    assert runs.losses(name) == pytest.approx(runs.losses("chain.exact"), rel=1e-6)
    assert worst_error(runs.parameters(name), runs.parameters("chain.exact")) < 1e-6
    assert all(math.isfinite(loss) for loss in runs.losses(name))
