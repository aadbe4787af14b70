"""Replicas that share the optimizer's state train, save and resume as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from executor_plans import by_counts, on_groups, pipeline_of, shuffled, traced, zoo_pipeline
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
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync
from planner.prediction import refresh

pytestmark = pytest.mark.usefixtures("shared_exports")
RANKS, STEPS = 4, 4
CLIPPED = "clip_norm = 0.3\n[schedule]\nkind = 'linear'\nwarmup_steps = 2\n"
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    found.add("tied.1", tied_and_uneven(), CLIPPED, every=2, sync=SMALL)
    found.add("single", tied_and_uneven("float32"), CLIPPED, sync=SMALL)
    found.add(
        "momentum", tied_and_uneven(optimizer="sgd_momentum"), sync="all_reduce:overlap=false"
    )
    found.add("groups.1", groups(), CLIPPED, every=2, sync=SMALL)
    scale = "[loss_scale]\ninitial = 1048576.0\n"
    found.add("half.1", tied_and_uneven("float16"), scale, every=2)
    found.add("half.whole", tied_and_uneven("float16", shard_optimizer=False), scale)
    for name, plan in (("tied", tied_and_uneven()), ("groups", groups())):
        job = plan.job.model_copy(update={"shard_optimizer": False})
        whole = refresh(plan.model_copy(update={"job": job}))
        step = str(found.checkpoints(f"{name}.1") / "step-00000002")
        found.add(f"{name}.2.shared", plan, CLIPPED, resume=step)
        found.add(f"{name}.2.whole", whole, CLIPPED, resume=step)
    step = str(found.checkpoints("half.1") / "step-00000002")
    found.add("half.2", tied_and_uneven("float16"), scale, resume=step)
    found.launch(RANKS)
    return found


@pytest.mark.parametrize("name", ["tied.1", "single", "momentum", "groups.1"])
def test_they_train_what_one_process_trains(runs: RunFiles, name: str) -> None:
    plan = Plan.load(runs.folder / f"{name}.json")
    alone, is_double = Alone(plan, runs.config(name)), plan.job.precision == "float64"
    assert runs.losses(name) == pytest.approx(alone.train(STEPS), rel=1e-12 if is_double else 1e-6)
    error = worst_error(runs.parameters(name), alone.parameters())
    # AdamW divides by the root of what rounding is relative to: the errors of gradients grow.
    assert error < (1e-11 if is_double else 1e-4)


@pytest.mark.parametrize("name", ["tied", "groups"])
@pytest.mark.parametrize("how", ["shared", "whole"])
def test_a_checkpoint_goes_on_shared_or_whole(runs: RunFiles, name: str, how: str) -> None:
    resumed, name = f"{name}.2.{how}", f"{name}.1"
    assert runs.losses(resumed) == pytest.approx(runs.losses(name)[2:], rel=1e-12)
    assert worst_error(runs.parameters(resumed), runs.parameters(name)) < 1e-12
    (one, other) = (Checkpoint.open(runs.checkpoints(row)) for row in (name, resumed))
    names = one.names("optimizer/")
    assert set(names) == set(other.names("optimizer/")) != set()
    for key, tensor in one.read(names).items():
        assert torch.allclose(tensor, other.read([key])[key], rtol=1e-9, atol=1e-15), key


def test_masters_are_shared_and_overflowing_steps_are_skipped(runs: RunFiles) -> None:
    shared, whole = runs.history("half.1"), runs.history("half.whole")
    assert [row["skipped"] for row in shared] == [row["skipped"] for row in whole]
    assert shared[0]["skipped"]
    assert not shared[-1]["skipped"]
    assert runs.losses("half.1") == pytest.approx(runs.losses("half.whole"), rel=0.01)
    assert runs.losses("half.2") == runs.losses("half.1")[2:]
    first, second = (runs.parameters(name) for name in ("half.1", "half.2"))
    assert all(first[name].equal(second[name]) for name in first)


def test_each_rank_has_its_part_of_the_state_alone() -> None:
    plan = tied_and_uneven()
    held = []
    for rank in range(RANKS):
        prepared = prepare(plan, place=PlanRank(rank, RANKS))
        weights = optimisation_of(prepared).weights.masters
        held.append({name: weight.numel() for name, weight in weights.items()})
    elements = {p.name: p.elements for p in plan.model.graph.parameters}
    for name, count in elements.items():
        assert sum(row.get(name, 0) for row in held) == count, name
    first, second = (sum(held[rank].values()) for rank in (1, 2))
    assert abs(first - second) <= 2


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
