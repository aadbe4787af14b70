"""Replicas that divide weights and gradients train, save and resume as one process does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from executor_plans import pipeline_of, random_orders, random_owners, traced
from launch import forked
from plain_torch import Alone, worst_error
from run_files import RunFiles

from executor.checkpoint import Checkpoint
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank
from executor.training.rank_optimisation import optimisation_of
from models import ZOO
from planner.assembly import plan_by_hand
from planner.plan.plan import Plan
from planner.prediction import refresh
from planner.schedules.pipelines import pipelines_of
from planner.space import WITH_SHARDED_PARAMETERS

pytestmark = pytest.mark.usefixtures("shared_exports")
RANKS, STEPS = 4, 4
CLIPPED = "clip_norm = 0.3\n[schedule]\nkind = 'linear'\nwarmup_steps = 2\n"


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


def tied(precision: str = "float64", **job: object) -> Plan:
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


def side_by_side(name: str = "resnet_tiny", **job: object) -> Plan:
    """Four replicas of all layers, which write in place and keep running statistics."""
    count = len(traced(name, "float64").layers)
    return pipelines(name, [(count, "d2 d0 d1 d3")], (2,), optimizer="sgd_momentum", **job)


def whole(plan: Plan) -> Plan:
    job = plan.job.model_copy(update={"shard_parameters": False})
    return refresh(plan.model_copy(update={"job": job}))


PLANS = {
    "tied": tied,
    "interleaved": interleaved,
    "side_by_side": side_by_side,
    "skips": lambda: side_by_side("unet_tiny"),
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
    within = 1e-6 if report["precision"] == "float32" else 1e-12
    errors = {key: report[key] for key in ("loss", "whole", "update")}
    assert report["excess"] <= 1, report
    assert max(errors.values()) < within, report


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    found.add("divided.1", tied(), CLIPPED, every=2)
    found.add("whole.1", whole(tied()), CLIPPED, every=2)
    for before in ("divided", "whole"):
        step = str(found.checkpoints(f"{before}.1") / "step-00000002")
        found.add(f"{before}.2.divided", tied(), CLIPPED, resume=step)
        found.add(f"{before}.2.whole", whole(tied()), CLIPPED, resume=step)
    scale = "[loss_scale]\ninitial = 1048576.0\n"
    found.add("half.1", tied("float16"), scale, every=2)
    found.add("half.whole", whole(tied("float16")), scale)
    step = str(found.checkpoints("half.1") / "step-00000002")
    found.add("half.2", tied("float16"), scale, resume=step)
    found.launch(RANKS)
    return found


def test_they_train_what_one_process_trains(runs: RunFiles) -> None:
    alone = Alone(tied(), runs.config("divided.1"))
    assert runs.losses("divided.1") == pytest.approx(alone.train(STEPS), rel=1e-12)
    assert worst_error(runs.parameters("divided.1"), alone.parameters()) < 1e-11


@pytest.mark.parametrize("before", ["divided", "whole"])
@pytest.mark.parametrize("after", ["divided", "whole"])
def test_a_checkpoint_goes_on_divided_or_whole(runs: RunFiles, before: str, after: str) -> None:
    resumed, first = f"{before}.2.{after}", f"{before}.1"
    assert runs.losses(resumed) == pytest.approx(runs.losses(first)[2:], rel=1e-12)
    assert worst_error(runs.parameters(resumed), runs.parameters(first)) < 1e-12
    (one, other) = (Checkpoint.open(runs.checkpoints(row)) for row in (first, resumed))
    names = one.names("optimizer/")
    assert set(names) == set(other.names("optimizer/")) != set()
    for key, tensor in one.read(names).items():
        assert torch.allclose(tensor, other.read([key])[key], rtol=1e-9, atol=1e-15), key


def test_masters_are_divided_and_overflowing_steps_are_skipped(runs: RunFiles) -> None:
    divided, of_whole = runs.history("half.1"), runs.history("half.whole")
    assert [row["skipped"] for row in divided] == [row["skipped"] for row in of_whole]
    assert divided[0]["skipped"]
    assert not divided[-1]["skipped"]
    assert runs.losses("half.1") == pytest.approx(runs.losses("half.whole"), rel=0.01)
    assert runs.losses("half.2") == runs.losses("half.1")[2:]
    first, second = (runs.parameters(name) for name in ("half.1", "half.2"))
    assert all(first[name].equal(second[name]) for name in first)


def test_each_rank_holds_its_part_of_weights_gradients_and_state_alone(tmp_path: Path) -> None:
    plan, held = tied(), []
    for rank in range(RANKS):
        prepared = prepare(plan, place=PlanRank(rank, RANKS))
        optimisation = optimisation_of(prepared)
        layers = optimisation.shards.divided_weights
        for layer in layers:
            layer.begin()
            assert all(p.untyped_storage().nbytes() == 0 for p in layer.bucket.parameters.values())
        weights = optimisation.weights.masters
        held.append({name: weight.numel() for name, weight in weights.items()})
        names = {name for layer in layers for name in layer.bucket.parameters}
        assert names == plan.problem.divided_parameters & set(prepared.parameters)
    elements = {p.name: p.elements for p in plan.model.graph.parameters}
    for name, count in elements.items():
        assert sum(row.get(name, 0) for row in held) == count, name
