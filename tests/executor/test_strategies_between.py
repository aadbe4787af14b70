"""Strategies between pipelines, on four processes, against one process in plain torch."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from executor_plans import scheduled, zoo_pipeline
from launch import forked
from plain_torch import Alone, Named, worst_error
from run_files import training_file
from torch import Tensor

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from executor.training.batches import batches
from planner.plan.plan import Plan
from planner.tracing.factory import import_factory

pytestmark = pytest.mark.extensive
WORKER = Path(__file__).with_name("pipelines_worker.py")
PIPELINES, EACH, STEPS = 2, 2, 5
TOGETHER = "first_wait_s=1000,most_wait_s=1000"
EXACT = {
    "servers": ("parameter_server", "adamw"),
    "two_servers": ("parameter_server:servers=2", "sgd_momentum"),
    "waves": ("wave_synchronous:distance=0,servers=2", "sgd_momentum"),
    "ready": (f"semi_decentralized:{TOGETHER}", "sgd"),
}
LOOSE = {
    "drawn": ("partial_all_reduce:group_size=2", "sgd"),
    "pairs": ("ad_psgd:pairs=matching", "sgd"),
    "asynchronous": ("parameter_server:mode=async", "sgd_momentum"),
    "eager": ("eager_parameter_server", "sgd_momentum"),
    "apart": ("wave_synchronous:distance=1", "adamw"),
    "bipartite": ("ad_psgd", "adamw"),
    "static": ("partial_all_reduce:schedule=static", "adamw"),
    "semi": ("semi_decentralized", "adamw"),
    "behind": ("semi_decentralized:overlap=true", "adamw"),
    "drawn_behind": ("partial_all_reduce:group_size=2,overlap=true", "sgd"),
}


def plan_of(optimizer: str) -> Plan:
    """Two pipelines of two places; the first and last stage share a parameter."""
    job = {"precision": "float64", "optimizer": optimizer}
    devices = ["d0 d1", "d2 d3"]
    return scheduled(zoo_pipeline("gpt_tiny", [4], devices, PIPELINES * EACH, **job))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings, run one after the other."""
    folder = tmp_path_factory.mktemp("between")
    for name, (sync, optimizer) in {**EXACT, **LOOSE}.items():
        plan_of(optimizer).save(folder / f"{name}.json")
        (folder / f"{name}.toml").write_text(training_file(folder / name, STEPS))
        (folder / f"{name}.run").write_text(json.dumps({"sync": sync}))
    plan_of("sgd").save(folder / "often.json")
    (folder / "often.toml").write_text(training_file(folder / "often", STEPS, every=2))
    (folder / "often.run").write_text(json.dumps({"sync": "semi_decentralized"}))
    done = forked(4, str(WORKER), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def weights(folder: Path) -> Named:
    checkpoint = Checkpoint.open(folder)
    names = checkpoint.names("parameters/")
    return {n.removeprefix("parameters/"): t for n, t in checkpoint.read(names).items()}


def alone(optimizer: str, config: TrainingConfig) -> Named:
    """One process that takes as many shares a step as there are pipelines."""
    plan = plan_of(optimizer)
    assert plan.model.factory is not None
    model = import_factory(plan.model.factory)(**plan.model.arguments).double()
    batch_of = batches("random", model, plan.job, config.seed)

    def of_shares(step: int, microbatch: int) -> Mapping[str, Tensor]:
        share = (step - 1) * PIPELINES + microbatch // EACH
        return batch_of(share + 1, microbatch % EACH)

    def plain(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=config.learning_rate)

    own = plain if optimizer == "sgd" else None
    trained = Alone(plan, config, batch_of=of_shares, optimizer=own)
    trained.train(STEPS)
    return {name: p.detach() for name, p in trained.masters.items()}


@pytest.mark.parametrize("name", EXACT)
def test_where_all_take_part_in_every_group_it_is_the_training_of_one_process(
    folder: Path, name: str
) -> None:
    config = TrainingConfig.load(folder / f"{name}.toml")
    found, expected = weights(folder / name), alone(EXACT[name][1], config)
    assert worst_error(found, expected) < 1e-11


@pytest.mark.parametrize("name", LOOSE)
def test_every_share_is_trained_and_the_loss_falls(folder: Path, name: str) -> None:
    histories = [
        json.loads((folder / f"{name}.{rank}.history").read_text()) for rank in (0, 1, 2, 3)
    ]
    assert len(histories[0]) + len(histories[1]) == PIPELINES * STEPS
    assert len(histories[2]) == len(histories[0])
    ordered = [row["loss"] for row in histories[0] + histories[1]]
    assert all(0 < loss < 10 for loss in ordered)
    assert weights(folder / name)


def test_checkpoints_on_the_way_and_at_the_end_resume_under_the_whole_plan(folder: Path) -> None:
    steps = sorted(path.name for path in (folder / "often").glob("step-*"))
    assert steps[-1] == f"step-{STEPS:08d}"
    assert len(steps) >= 2
    seen = Checkpoint.open(folder / "often").facts["samples_seen"]
    assert seen == STEPS * PIPELINES * EACH * 2
