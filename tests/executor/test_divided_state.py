"""Replicas that share the optimizer's state, or divide weights and gradients too, train, save and
resume as one process does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from executor_plans import (
    by_counts,
    on_groups,
    pipeline_of,
    random_orders,
    random_owners,
    shuffled,
    traced,
    zoo_pipeline,
)
from launch import forked
from plain_torch import Alone, worst_error
from run_files import RunFiles

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.refusals import require_possible
from executor.launch.run import PlanRank, RunSettings
from executor.sync import require_strategy
from executor.training.rank_optimisation import optimisation_of
from models import ZOO
from planner.assembly import plan_by_hand
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.prediction import refresh
from planner.schedules.pipelines import pipelines_of
from planner.space import WITH_SHARDED_PARAMETERS

pytestmark = pytest.mark.usefixtures("shared_exports")
RANKS, STEPS = 4, 4
CLIPPED = "clip_norm = 0.3\n[schedule]\nkind = 'linear'\nwarmup_steps = 2\n"
OVERFLOWING = "[loss_scale]\ninitial = 1048576.0\n"
SMALL = "all_reduce:bucket_mib=0.05"


def tied_and_uneven(precision: str = "float64", **job: object) -> Plan:
    """Embedding and head on two ranks, split and whole backwards, an idle replica."""
    fields = {"optimizer": "adamw", "learning_rate": 0.003, "shard_optimizer": True, **job}
    fields["precision"] = precision
    pipeline = zoo_pipeline("gpt_tiny", [3, 6], ["d0", "d1 d2", "d3 d0"], 4, **fields)
    owners = {**by_counts(1, {"d1": 1, "d2": 3}), **by_counts(2, {"d3": 4, "d0": 0})}
    return shuffled(pipeline, 1, {**{(0, m): "d0" for m in range(4)}, **owners}, split=0.5)


def groups() -> Plan:
    """Two replicas of all layers, each a tensor-parallel group that shares positions."""
    return on_groups(
        "gpt_tiny",
        [],
        ["g0 g1"],
        lambda pipeline: shuffled(pipeline, 2, split=0.5),
        sequence=True,
        precision="float64",
        optimizer="adamw",
        microbatches=3,
        shard_optimizer=True,
    )


def pipelines(
    name: str,
    stages: Sequence[tuple[int, str]],
    again: Sequence[int] = (),
    seed: int = 1,
    precision: str = "float64",
    **job: object,
) -> Plan:
    """Equal pipelines in one random order; stages by their ends and devices."""
    graph = traced(name, precision)
    layers = list(graph.layers)
    begins = [0, *(end for end, _ in stages)]
    rows = [
        (layers[a:b], on.split(), [n for k, n in enumerate(layers) if k in again and a <= k < b])
        for a, (b, on) in zip(begins, stages, strict=False)
    ]
    fields = {"optimizer": "adamw", "learning_rate": 0.003, "shard_parameters": True, **job}
    fields = {**WITH_SHARDED_PARAMETERS, "microbatches": 4, "precision": precision, **fields}
    placed = pipeline_of(graph, ZOO[name], rows, **fields)
    groups = pipelines_of(placed)
    assert groups is not None
    one, rng = groups.first, random.Random(seed)
    return plan_by_hand(placed, groups.spread(random_orders(one, random_owners(one, rng), rng)))


def divided(precision: str = "float64", **job: object) -> Plan:
    """Embedding and head, which share their weights, on other ranks; two layers run again."""
    count = len(traced("gpt_tiny", precision).layers)
    return pipelines(
        "gpt_tiny", [(4, "d0 d1"), (count, "d3 d2")], (1, 5), precision=precision, **job
    )


def interleaved() -> Plan:
    """Three stages on two pairs of ranks: the first pair has the first and the last."""
    count = len(traced("llama_tiny", "float32").layers)
    ends = [(2, "d0 d1"), (4, "d2 d3"), (count, "d0 d1")]
    return pipelines("llama_tiny", ends, precision="float32", microbatches=6)


def side_by_side() -> Plan:
    """Four replicas of all layers, which write in place and keep running statistics."""
    count = len(traced("resnet_tiny", "float64").layers)
    return pipelines("resnet_tiny", [(count, "d2 d0 d1 d3")], (2,), optimizer="sgd_momentum")


def whole(plan: Plan) -> Plan:
    """The same plan with all state on every replica."""
    job = plan.job.model_copy(update={"shard_optimizer": False, "shard_parameters": False})
    return refresh(plan.model_copy(update={"job": job}))


KINDS = {"tied": tied_and_uneven, "groups": groups, "divided": divided}
"""Plans of which each is resumed with divided state and with whole."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    found.add("single", tied_and_uneven("float32"), CLIPPED, sync=SMALL)
    found.add(
        "momentum", tied_and_uneven(optimizer="sgd_momentum"), sync="all_reduce:overlap=false"
    )
    for name, build in KINDS.items():
        plan = build()
        small = {} if plan.job.shards_parameters else {"sync": SMALL}
        befores = {"divided": plan, "whole": whole(plan)}
        for before in befores:
            if before == "divided" or name == "divided":
                found.add(f"{name}.{before}.1", befores[before], CLIPPED, every=2, **small)
                step = str(found.checkpoints(f"{name}.{before}.1") / "step-00000002")
                for after in befores:
                    found.add(f"{name}.{before}.2.{after}", befores[after], CLIPPED, resume=step)
    for name in ("tied", "divided"):
        half = KINDS[name]("float16")
        found.add(f"half.{name}.1", half, OVERFLOWING, every=2)
        found.add(f"half.{name}.whole", whole(half), OVERFLOWING)
        step = str(found.checkpoints(f"half.{name}.1") / "step-00000002")
        found.add(f"half.{name}.2", half, OVERFLOWING, resume=step)
    found.launch(RANKS)
    return found


TRAINED = ["tied.divided.1", "groups.divided.1", "divided.divided.1", "single", "momentum"]


@pytest.mark.extensive
@pytest.mark.parametrize("name", TRAINED)
def test_they_train_what_one_process_trains(runs: RunFiles, name: str) -> None:
    plan = Plan.load(runs.folder / f"{name}.json")
    alone, is_double = Alone(plan, runs.config(name)), plan.job.precision == "float64"
    assert runs.losses(name) == pytest.approx(alone.train(STEPS), rel=1e-12 if is_double else 1e-6)
    error = worst_error(runs.parameters(name), alone.parameters())
    # AdamW divides by the root of what rounding is relative to: the errors of gradients grow.
    assert error < (1e-11 if is_double else 1e-4)


RESUMED = [("tied", "divided"), ("groups", "divided"), ("divided", "divided"), ("divided", "whole")]


@pytest.mark.extensive
@pytest.mark.parametrize(("name", "before"), RESUMED)
@pytest.mark.parametrize("after", ["divided", "whole"])
def test_a_checkpoint_goes_on_divided_or_whole(
    runs: RunFiles, name: str, before: str, after: str
) -> None:
    first, resumed = f"{name}.{before}.1", f"{name}.{before}.2.{after}"
    assert runs.losses(resumed) == pytest.approx(runs.losses(first)[2:], rel=1e-12)
    assert worst_error(runs.parameters(resumed), runs.parameters(first)) < 1e-12
    (one, other) = (Checkpoint.open(runs.checkpoints(row)) for row in (first, resumed))
    names = one.names("optimizer/")
    assert set(names) == set(other.names("optimizer/")) != set()
    for key, tensor in one.read(names).items():
        assert torch.allclose(tensor, other.read([key])[key], rtol=1e-9, atol=1e-15), key


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["tied", "divided"])
def test_masters_are_divided_and_overflowing_steps_are_skipped(runs: RunFiles, name: str) -> None:
    first, resumed, of_whole = (f"half.{name}.{row}" for row in ("1", "2", "whole"))
    skipped = [row["skipped"] for row in runs.history(first)]
    assert skipped == [row["skipped"] for row in runs.history(of_whole)]
    assert skipped[0]
    assert not skipped[-1]
    assert runs.losses(first) == pytest.approx(runs.losses(of_whole), rel=0.01)
    assert runs.losses(resumed) == runs.losses(first)[2:]
    expected = runs.parameters(first)
    assert all(tensor.equal(expected[n]) for n, tensor in runs.parameters(resumed).items())


@pytest.mark.parametrize("name", ["tied", "divided"])
def test_each_rank_holds_its_part_alone(name: str) -> None:
    """Of the optimizer's state; between iterations also of divided weights."""
    plan, held = KINDS[name](), []
    for rank in range(RANKS):
        prepared = prepare(plan, place=PlanRank(rank, RANKS))
        optimisation = optimisation_of(prepared)
        layers = optimisation.shards.divided_weights
        for layer in layers:
            layer.begin()
            assert all(p.untyped_storage().nbytes() == 0 for p in layer.bucket.parameters.values())
        names = {name for layer in layers for name in layer.bucket.parameters}
        assert names == plan.problem.divided_parameters & set(prepared.parameters)
        weights = optimisation.weights.masters
        held.append({name: weight.numel() for name, weight in weights.items()})
    for parameter in plan.model.graph.parameters:
        assert sum(row.get(parameter.name, 0) for row in held) == parameter.elements
    if name == "tied":
        first, second = (sum(held[rank].values()) for rank in (1, 2))
        assert abs(first - second) <= 2


PLANS = {
    "tied": tied_and_uneven,
    "divided": divided,
    "interleaved": interleaved,
    "side_by_side": side_by_side,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plans")
    for name, build in PLANS.items():
        build().save(folder / f"{name}.json")
    run = forked(RANKS, "-m", "benchmarks.executor.parity_worker", str(folder))
    assert run.returncode == 0, run.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in (folder / "report").iterdir()}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_one_process(reports: dict[str, dict], name: str) -> None:
    report = reports[name]
    assert report["problems"] == []
    within = 1e-6 if report["precision"] == "float32" else 1e-11
    errors = {key: report[key] for key in ("loss", "whole", "update")}
    assert report["excess"] <= 1, report
    assert max(errors.values()) < within, report


def test_what_is_not_there_with_shared_state_is_named() -> None:
    plan = tied_and_uneven()
    fused = plan.model_copy(update={"sync": Sync(strategy="fused")})
    with pytest.raises(PipeplanError, match="'fused' keeps the optimizer's state whole"):
        require_strategy(fused)
    config = TrainingConfig.parse({"optimizer": "lib.optimizers:lion"}, "train()")
    with pytest.raises(PipeplanError, match=r"optimizer: one of your own is not supported"):
        require_possible(plan, RunSettings(), config)


def test_a_plan_of_one_replica_keeps_all_state(tmp_path: Path) -> None:
    layers = list(traced("gpt_tiny").layers)
    fields = {"microbatches": 2, "optimizer": "adamw", "shard_optimizer": True}
    pipeline = pipeline_of(traced("gpt_tiny"), ZOO["gpt_tiny"], [(layers, ["d0"])], **fields)
    prepared = prepare(shuffled(pipeline, 1), place=PlanRank(0, 1))
    optimisation = optimisation_of(prepared)
    assert set(optimisation.weights.masters.values()) == set(prepared.parameters.values())
