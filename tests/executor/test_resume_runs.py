"""Real trainings that are interrupted and resumed, by the same plan, another, or alone."""

import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from executor_plans import scheduled, zoo_pipeline
from launch import ROOT, environment, forked
from plain_torch import Alone, Named, worst_error
from warm_python import warm_python

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from planner.plan.plan import Plan

pytestmark = pytest.mark.extensive
WORKER = Path(__file__).with_name("runs_worker.py")
STAGES = {1: ([], ["d0"]), 3: ([2, 5], ["d0", "d1", "d2"]), 4: ([4], ["d0 d1", "d2 d3"])}
"""Cuts and devices, by the number of ranks."""


def plan_of(ranks: int, name: str = "gpt_tiny", **job: object) -> Plan:
    fields = {"precision": "float64", "optimizer": "adamw", **job}
    return scheduled(zoo_pipeline(name, *STAGES[ranks], 4, **fields))


def training_file(folder: Path, *, every: int, steps: int = 6, **fields: object) -> str:
    rows = {"steps": steps, "seed": 5, "data": "random", "clip_norm": 0.5, **fields}
    lines = [f"{name} = {json.dumps(value)}" for name, value in rows.items()]
    schedule = '[schedule]\nkind = "cosine"\nwarmup_steps = 2'
    table = f'[checkpoint]\nfolder = "{folder}"\nevery = {every}'
    return "\n".join(['format = "pipeplan-train/1"', *lines, schedule, table, ""])


def write(folder: Path, name: str, plan: Plan, text: str, run: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    plan.save(folder / f"{name}.json")
    (folder / f"{name}.toml").write_text(text)
    (folder / f"{name}.run").write_text(json.dumps(run))


def launch(ranks: int, folder: Path) -> None:
    done = forked(ranks, str(WORKER), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]


def losses(folder: Path, name: str) -> list[float]:
    history = json.loads((folder / f"{name}.history").read_text())
    assert isinstance(history, list), history
    return [metrics["loss"] for metrics in history]


def everything(folder: Path) -> Named:
    """Parameters, buffers and the optimizer's state."""
    checkpoint = Checkpoint.open(folder)
    return checkpoint.read(checkpoint.names())


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on four ranks, and steps 4 to 6 again from the checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("four")
    for prefix, job in (("", {}), ("half_", {"precision": "float16"})):
        whole, resumed = folder / f"{prefix}whole", folder / f"{prefix}resumed"
        # The first steps of float16 overflow, so that its loss scale has moved.
        scale = "[loss_scale]\ninitial = 1048576.0\ngrowth_interval = 2\n" if job else ""
        text = training_file(whole, every=3) + scale
        write(folder, f"a_{prefix}whole", plan_of(4, **job), text, {})
        resume = {"resume": str(whole / "step-00000003")}
        text = training_file(resumed, every=9) + scale
        write(folder, f"b_{prefix}resumed", plan_of(4, **job), text, resume)
    launch(4, folder)
    return folder


@pytest.mark.parametrize("prefix", ["", "half_"])
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(four: Path, prefix: str) -> None:
    assert losses(four, f"b_{prefix}resumed") == losses(four, f"a_{prefix}whole")[3:]
    folders = four / f"{prefix}whole", four / f"{prefix}resumed"
    whole, resumed = map(everything, folders)
    assert whole.keys() == resumed.keys()
    assert all(resumed[name].equal(tensor) for name, tensor in whole.items())
    scales = [Checkpoint.open(folder).facts["loss_scale"] for folder in folders]
    assert scales[0] == scales[1]
    assert (scales[0] is not None and scales[0]["scale"] != 2.0**20) == bool(prefix)


REFUSED = {
    "seed": ({}, {"seed": 6}, "seed is 5, here it is 6; train with its seed"),
    "optimizer": ({"optimizer": "sgd"}, {}, "it was trained by AdamW, here it is SGD"),
    "precision": ({"precision": "float32"}, {}, "precision is 'float64', here it is 'float32'"),
    "model": ({"name": "llama_tiny"}, {}, "it is of 'gpt_tiny', the plan of 'llama_tiny'"),
}


@pytest.fixture(scope="module")
def three(four: Path) -> Path:
    """The training of four ranks resumed by three, and what cannot be resumed so."""
    folder = four / "three"
    resume = {"resume": str(four / "whole" / "step-00000003")}
    write(folder, "resumed", plan_of(3), training_file(folder / "resumed", every=9), resume)
    for name, (job, fields, _) in REFUSED.items():
        text = training_file(folder / name, every=9, **fields)
        write(folder, name, plan_of(3, **job), text, resume)
    forged = folder / "forged"
    shutil.copytree(four / "whole" / "step-00000003", forged)
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["facts"]["samples_seen"] = -3
    (forged / "manifest.json").write_text(json.dumps(manifest))
    text = training_file(folder / "elsewhere", every=9)
    write(folder, "forged", plan_of(3), text, {"resume": str(forged)})
    launch(3, folder)
    return folder


def assert_same(folder: Path, found: Sequence[float], four: Path) -> None:
    assert found == pytest.approx(losses(four, "a_whole")[3:], rel=1e-10)
    whole, resumed = everything(four / "whole"), everything(folder)
    parameters = [name for name in whole if name.startswith("parameters/")]
    assert (
        worst_error({n: resumed[n] for n in parameters}, {n: whole[n] for n in parameters}) < 1e-9
    )
    assert whole.keys() == resumed.keys()


def test_another_plan_goes_on_with_a_training(four: Path, three: Path) -> None:
    assert_same(three / "resumed", losses(three, "resumed"), four)


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_of_another_training_is_refused(three: Path, name: str) -> None:
    found = json.loads((three / f"{name}.history").read_text())
    assert isinstance(found, str)
    assert found.startswith(f"{three.parent}/whole/step-00000003: ")
    assert REFUSED[name][2] in found


def test_a_count_of_samples_that_is_none_is_refused(three: Path) -> None:
    found = json.loads((three / "forged.history").read_text())
    assert found.startswith(f"{three}/forged: samples_seen is -3, which is no count of samples")


def alone(folder: Path, *options: str, script: Sequence[str] = ("-m", "executor")) -> list[str]:
    """Run the plan of one rank without torchrun; lines on stdout."""
    command = [warm_python(), *script, str(folder / "plan.json"), *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    expected = 0 if script == ("-m", "executor") else -signal.SIGKILL
    assert done.returncode == expected, done.stderr
    return done.stdout.splitlines()


def test_one_process_goes_on_with_a_training_of_four(four: Path, tmp_path: Path) -> None:
    plan_of(1).save(tmp_path / "plan.json")
    (tmp_path / "train.toml").write_text(training_file(tmp_path / "one", every=9))
    resume = str(four / "whole" / "step-00000003")
    lines = alone(tmp_path, "--config", str(tmp_path / "train.toml"), "--resume", resume)
    found = [float(line.split("loss")[1].split()[0]) for line in lines if line.startswith("step")]
    assert found == [round(loss, 4) for loss in losses(four, "a_whole")[3:]]
    assert_same(tmp_path / "one", losses(four, "a_whole")[3:], four)


KILLED = """
import os, runpy, signal
rename, calls = os.rename, []
def rename_or_die(source, target):
    calls.append(target)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.rename = rename_or_die
runpy.run_module("executor", run_name="__main__", alter_sys=True)
"""


def test_who_is_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    plan = plan_of(1)
    plan.save(tmp_path / "plan.json")
    text = training_file(tmp_path / "saved", every=2)
    (tmp_path / "train.toml").write_text(text)
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["--config", str(tmp_path / "train.toml")]
    alone(tmp_path, *options, script=[str(tmp_path / "killed.py")])
    assert Checkpoint.open(tmp_path / "saved").step == 2
    assert [path for path in (tmp_path / "saved").iterdir() if path.suffix == ".writing"]
    lines = alone(tmp_path, *options, "--resume", str(tmp_path / "saved"))
    assert lines[0].startswith("compared with eager autograd: ")
    assert lines[1].startswith("resumes from ")
    assert lines[2].startswith("step    3")
    checkpoint = Checkpoint.open(tmp_path / "saved")
    assert checkpoint.step == 6
    assert not [path for path in (tmp_path / "saved").iterdir() if path.suffix == ".writing"]
    reference = Alone(plan, TrainingConfig.load(tmp_path / "train.toml"))
    reference.train(6)
    expected = {f"parameters/{name}": p for name, p in reference.parameters().items()}
    assert worst_error(checkpoint.read(expected), expected) < 1e-12
