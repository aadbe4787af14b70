"""Pipelines that do not flush, on four processes, against delayed gradients in one process."""

import json
from pathlib import Path

import pytest
import torch
from executor_plans import DEVICES, pipeline_of, scheduled, shuffled, traced, zoo_pipeline
from launch import forked
from plain_torch import Alone, worst_error
from torch import Tensor

from executor.checkpoint import Checkpoint
from executor.emulation.pace import Pace
from executor.launch.asynchronous import require_asynchronous, stretches, version_bytes
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank, RunSettings
from executor.stage.runner import StageRunner
from executor.stage.stashing import StashingWorker
from executor.training.data import DeviceBatches, batches
from executor.training.training import run_emulation
from executor.training.trainer import optimisation_of
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync

WORKER = Path(__file__).with_name("runs_worker.py")
STEPS = 5


def llama(precision: str = "float32", optimizer: str = "sgd_momentum") -> Plan:
    graph = traced("llama_tiny", precision)
    layers = list(graph.layers)
    parts = [layers[:2], layers[2:3], layers[3:5], layers[5:]]
    # The second stage recomputes, on the weights of the forward.
    stages = [(p, [d], p if n == 1 else ()) for n, (p, d) in enumerate(zip(parts, DEVICES, strict=True))]
    job = {"precision": precision, "optimizer": optimizer, "microbatches": 3}
    return scheduled(pipeline_of(graph, ZOO["llama_tiny"], stages, **job))


def vgg() -> Plan:
    """With dropout, whose random state goes along with the activations."""
    return scheduled(zoo_pipeline("vgg_tiny", [2, 4, 6], DEVICES, 6, optimizer="adamw"))


PLANS = {
    "llama": (llama(), "async", STEPS),
    "emptied": (llama("float64", "adamw"), "async", 2),
    "vgg": (vgg(), "async", STEPS),
    "llama_flush": (llama(), "flush", STEPS),
}


def training_file(folder: Path, every: int) -> str:
    rows = {"steps": STEPS, "seed": 5, "data": "random", "learning_rate": 0.01}
    lines = [f"{name} = {json.dumps(value)}" for name, value in rows.items()]
    tables = '[schedule]\nkind = "cosine"\nwarmup_steps = 2\n'
    tables += f'[checkpoint]\nfolder = "{folder}"\nevery = {every}'
    return "\n".join(['format = "pipeplan-train/1"', *lines, tables, ""])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asynchronous")
    for name, (plan, pipelining, every) in PLANS.items():
        plan.save(folder / f"{name}.json")
        (folder / f"{name}.toml").write_text(training_file(folder / name, every))
        (folder / f"{name}.run").write_text(json.dumps({"pipelining": pipelining}))
    done = forked(4, str(WORKER), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Delayed(Alone):
    """Each microbatch's gradient, of stage s at weights that lack its last n - 1 - s updates."""

    def of_stages(self) -> dict[str, int]:
        used = {layer.name: layer.parameters for layer in self.plan.model.graph.layers}
        return {p: s.index for s in self.plan.stages for layer in s.layers for p in used[layer]}

    @torch.no_grad()
    def set(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def now(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def delayed(self, every: int) -> list[float]:
        count, stage_of = self.plan.microbatches, self.of_stages()
        losses, history, empty_at = [0.0] * STEPS, [self.now()], 0
        for t in range(STEPS * count):
            step = t // count + 1
            if t % (every * count) == 0:
                empty_at = t
            late = {n: len(self.plan.stages) - 1 - s for n, s in stage_of.items()}
            seen = {n: history[max(empty_at, t - late[n])][n] for n in history[0]}
            self.set(seen)
            self.model.zero_grad(set_to_none=True)
            losses[step - 1] += self._microbatch(step, t % count) / count
            for p in self.model.parameters():
                p.grad = p.grad * count  # It is of the mean over the step.
            self.set(history[-1])
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * self.factor(step)
            self.optimizer.step()
            history.append(self.now())
        return losses


@pytest.mark.parametrize("name", [n for n, (_, kind, _) in PLANS.items() if kind == "async"])
def test_it_trains_as_delayed_gradients_do(folder: Path, name: str) -> None:
    plan, _, every = PLANS[name]
    alone = Delayed(plan, TrainingConfig.load(folder / f"{name}.toml"))
    losses = alone.delayed(every)
    checkpoint = Checkpoint.open(folder / name)
    names = checkpoint.names("parameters/")
    found = {n.removeprefix("parameters/"): t for n, t in checkpoint.read(names).items()}
    tolerance = 1e-6 if plan.job.precision == "float32" else 1e-12
    assert worst_error(found, alone.parameters()) < tolerance
    history = json.loads((folder / f"{name}.history").read_text())
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-5)


def test_its_delays_make_a_difference(folder: Path) -> None:
    """So that the test above would notice if there were none."""
    found = [
        [row["loss"] for row in json.loads((folder / f"{name}.history").read_text())]
        for name in ("llama", "llama_flush")
    ]
    assert found[0] != pytest.approx(found[1], rel=1e-4)
