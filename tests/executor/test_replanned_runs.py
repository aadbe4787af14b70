"""A real training that loses a device, and goes on by the plan that replanning makes."""

import json
from pathlib import Path

import pytest
from executor_plans import scheduled, zoo_pipeline
from launch import forked

from planner.plan.plan import Plan
from planner.replanning import replan

pytestmark = pytest.mark.extensive
WORKER = Path(__file__).with_name("runs_worker.py")
TRAINING = """
format = "pipeplan-train/1"
steps = 6
seed = 5
data = "random"
clip_norm = 0.5

[checkpoint]
folder = "{folder}"
every = 3
"""


def four_devices() -> Plan:
    job = {"precision": "float64", "optimizer": "adamw"}
    return scheduled(zoo_pipeline("gpt_tiny", [4], ["d0 d1", "d2 d3"], 4, **job))


def train(plan: Plan, folder: Path, **run: str) -> list[float]:
    """The losses of a training in processes of its own."""
    folder.mkdir()
    plan.save(folder / "run.json")
    (folder / "run.toml").write_text(TRAINING.format(folder=folder / "checkpoints"))
    (folder / "run.run").write_text(json.dumps(run))
    done = forked(len(plan.ranks), str(WORKER), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    history = json.loads((folder / "run.history").read_text())
    assert isinstance(history, list), history
    return [metrics["loss"] for metrics in history]


def test_training_goes_on_without_a_lost_device_as_if_it_had_been_there(tmp_path: Path) -> None:
    """Steps 4 to 6 on three ranks from the checkpoint of step 3, against six steps on four."""
    whole = train(four_devices(), tmp_path / "four")
    found = replan(four_devices(), lost=["d1"], deterministic=True, time_limit_s=0.3)
    assert set(found.plan.ranks) <= {"d0", "d2", "d3"}
    at = tmp_path / "four" / "checkpoints" / "step-00000003"
    resumed = train(found.plan, tmp_path / "three", resume=str(at))
    assert resumed == pytest.approx(whole[3:], rel=1e-10)
