"""A real training that loses a device, and goes on by the plan that replanning makes."""

from pathlib import Path

import pytest
from executor_plans import scheduled, zoo_pipeline
from run_files import RunFiles

from planner.plan.plan import Plan
from planner.replanning import replan

pytestmark = pytest.mark.extensive


def four_devices() -> Plan:
    job = {"precision": "float64", "optimizer": "adamw"}
    return scheduled(zoo_pipeline("gpt_tiny", [4], ["d0 d1", "d2 d3"], 4, **job))


def trained(plan: Plan, folder: Path, **run: str) -> RunFiles:
    """A training in processes of its own."""
    folder.mkdir()
    found = RunFiles(folder, 6)
    found.add("run", plan, "clip_norm = 0.5", every=3, **run)
    found.launch(len(plan.ranks))
    return found


def test_training_goes_on_without_a_lost_device_as_if_it_had_been_there(tmp_path: Path) -> None:
    """Steps 4 to 6 on three ranks from the checkpoint of step 3, against six steps on four."""
    whole = trained(four_devices(), tmp_path / "four")
    found = replan(four_devices(), lost=["d1"], deterministic=True, time_limit_s=0.3)
    assert set(found.plan.ranks) <= {"d0", "d2", "d3"}
    at = whole.checkpoints("run") / "step-00000003"
    resumed = trained(found.plan, tmp_path / "three", resume=str(at))
    assert resumed.losses("run") == pytest.approx(whole.losses("run")[3:], rel=1e-10)
