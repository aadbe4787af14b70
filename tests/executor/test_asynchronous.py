"""Pipelines that do not flush, on four processes, against delayed gradients in one process."""

import json
from pathlib import Path

import pytest
import torch
from executor_plans import DEVICES, pipeline_of, scheduled, shuffled, traced, zoo_pipeline
from launch import forked
from plain_torch import Alone, worst_error
from run_files import training_file
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
from executor.training.trainer import optimisation_of
from executor.training.training import run_emulation
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Sync

pytestmark = pytest.mark.usefixtures("shared_exports")
WORKER = Path(__file__).with_name("runs_worker.py")
STEPS = 5


def llama(precision: str = "float32", optimizer: str = "sgd_momentum") -> Plan:
    graph = traced("llama_tiny", precision)
    layers = list(graph.layers)
    parts = [layers[:2], layers[2:3], layers[3:5], layers[5:]]
    # The second stage recomputes, on the weights of the forward.
    again = [(), parts[1], (), ()]
    stages = [(part, [d], r) for part, d, r in zip(parts, DEVICES, again, strict=True)]
    job = {"precision": precision, "optimizer": optimizer, "microbatches": 3}
    return scheduled(pipeline_of(graph, ZOO["llama_tiny"], stages, **job))


def vgg() -> Plan:
    """With dropout, whose random state goes along with the activations."""
    return scheduled(zoo_pipeline("vgg_tiny", [2, 4, 6], DEVICES, 6, optimizer="adamw"))


PLANS = {
    "llama": (llama, "async", STEPS),
    "emptied": (lambda: llama("float64", "adamw"), "async", 2),
    "vgg": (vgg, "async", STEPS),
    "llama_flush": (llama, "flush", STEPS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asynchronous")
    for name, (build, pipelining, every) in PLANS.items():
        build().save(folder / f"{name}.json")
        (folder / f"{name}.toml").write_text(training_file(folder / name, STEPS, every))
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
    build, _, every = PLANS[name]
    plan = build()
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


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_keeps_one_version_of_its_weights_a_microbatch_in_flight(stage: int) -> None:
    plan = llama()
    prepared = prepare(plan, place=PlanRank(stage, 4))
    (module,) = prepared.stages
    optimisation = optimisation_of(prepared)
    batch_of = batches("random", prepared.model, plan.job, 0)
    names, device = module.model_inputs, prepared.device
    data = DeviceBatches(lambda _, m: batch_of(1, m), names, (), device, None)
    runner = StageRunner(module, 1)
    worker = StashingWorker(runner, data, 0, 100, lambda: optimisation.step(1) and None)
    received = [
        torch.randn(t.shape) if t.dtype.is_floating_point else torch.zeros(t.shape, dtype=t.dtype)
        for t in worker.incoming(0)
    ]
    depth, trained = 3 - stage, next(iter(module.parameters.values()))
    first = trained.detach().clone()
    for microbatch in range(depth):
        worker.forward(microbatch, received)
    places, kept = set(), []
    for microbatch in range(6):
        worker.forward(microbatch + depth, received)
        places.add(trained.data_ptr())
        worker.backward(microbatch, [torch.ones(s.shape) for s in worker.returning(0)])
        kept.append(worker.versions)
    # Forwards before the first update share a version.
    assert kept == [min(t + 2, depth + 1) for t in range(6)]
    assert not torch.equal(trained, first)
    # The last stage, where nothing is in flight when it steps, needs no new memory at all.
    assert (len(places) == 1) == (depth == 0)
    assert version_bytes(plan)[stage] == depth * sum(
        p.numel() * p.element_size() for p in module.parameters.values()
    )


@pytest.fixture
def no_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


def replicated() -> Plan:
    return scheduled(zoo_pipeline("llama_tiny", [4], ["d0 d1", "d2"], 4))


def two_on_a_device() -> Plan:
    return scheduled(zoo_pipeline("llama_tiny", [2, 4], ["d0", "d1", "d0"], 4))


def split() -> Plan:
    return shuffled(zoo_pipeline("llama_tiny", [4], ["d0", "d1"], 4), 0, split=1.0)


def tied() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [4], ["d0", "d1"], 4))


def half() -> Plan:
    graph = traced("llama_tiny", "float16")
    layers = list(graph.layers)
    stages = [(layers[:4], ["d0"]), (layers[4:], ["d1"])]
    return scheduled(pipeline_of(graph, ZOO["llama_tiny"], stages, precision="float16"))


def offloading() -> Plan:
    graph = traced("llama_tiny")
    layers = list(graph.layers)
    stages = [(layers[:4], ["d0"], (), layers[:2]), (layers[4:], ["d1"])]
    return scheduled(pipeline_of(graph, ZOO["llama_tiny"], stages, microbatches=3, offload=True))


REFUSED = {
    replicated: "stage 0 has 2 replicas, whose gradients are summed at a flush; plan with repl",
    two_on_a_device: "d0 has 2 of them, but staleness is that of one stage a device; plan with",
    offloading: "stage 0 offloads stashes, whose copies belong to the order of a pipeline that",
    split: "orders: they split backwards, but a microbatch's update needs",
    tied: "model: stages 0 and 1 share wte.weight, which would have",
    half: "job.precision: float16 needs a loss scale that all stages change at once",
}


@pytest.mark.parametrize("make", REFUSED)
def test_plans_that_cannot_go_without_a_flush_are_refused(make: object) -> None:
    with pytest.raises(PipeplanError) as error:
        require_asynchronous(make(), TrainingConfig(), RunSettings())  # type: ignore[operator]
    (problem,) = error.value.problems
    assert problem.startswith("--pipelining async: ")
    assert REFUSED[make] in problem  # type: ignore[index]
    assert "--pipelining flush" in problem


def test_settings_that_need_a_flush_are_refused_together() -> None:
    config = TrainingConfig.parse({"clip_norm": 1.0, "timeline": "t.json"}, "here")
    plan = llama().model_copy(update={"sync": Sync(strategy="ad_psgd")})
    with pytest.raises(PipeplanError) as error:
        require_asynchronous(plan, config, RunSettings(sync_trace="x.json"))
    words = [problem.split(": ")[1] for problem in error.value.problems]
    assert words == ["sync.strategy", "clip_norm", "timeline", "sync-trace"]
    with pytest.raises(PipeplanError, match=r"--emulate with --pipelining async: .*emulate-speed"):
        run_emulation(llama(), 1, RunSettings(pipelining="async", pace=Pace()))


def test_stashed_weights_count_in_the_memory_that_a_stage_needs() -> None:
    """Stage 0 of four keeps three versions more, which the plan itself does not know of."""
    plan = llama()
    require_asynchronous(plan, TrainingConfig(), RunSettings())
    cluster = plan.cluster.model_dump(mode="json")
    # What its order needs, with three microbatches in flight, and the versions: less than four.
    needed = plan.predicted.devices["d0"].peak_memory_bytes + version_bytes(plan)[0]
    for kind in cluster["device_types"]:
        cluster["device_types"][kind] |= {"memory_gib": needed / 2**30, "reserved_gib": 0}
    small = plan.model_copy(update={"cluster": type(plan.cluster).parse(cluster, "cluster")})
    assert small.predicted.devices["d0"].peak_memory_bytes < needed
    with pytest.raises(PipeplanError, match=r"stage 0 needs .* GiB of them for stashed weights"):
        require_asynchronous(small, TrainingConfig(), RunSettings())


def test_a_pipeline_empties_before_checkpoints_and_at_the_end() -> None:
    table = TrainingConfig.parse({"checkpoint": {"folder": "x", "every": 4}}, "here").checkpoint
    stretch = stretches(3, 10, table)
    assert [stretch(step) for step in (3, 4, 5, 8, 9, 10)] == [
        (3, 4), (3, 4), (5, 8), (5, 8), (9, 10), (9, 10)
    ]  # fmt: skip
    assert [stretches(3, 10, None)(step) for step in (3, 10)] == [(3, 10), (3, 10)]
