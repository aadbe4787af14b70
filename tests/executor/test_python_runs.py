"""Training from a script of the user's: the documentation's, as it stands there."""

import subprocess
from pathlib import Path

import pytest
from documents import snippets
from executor_plans import scheduled, zoo_pipeline
from launch import ROOT, environment, torchrun
from warm_python import warm_python

from planner.measured.timeline import MeasuredTimeline

pytestmark = pytest.mark.extensive


def documented_script() -> str:
    found = snippets(ROOT / "docs" / "executor.md", "python")
    (script,) = [text for text in found if "from executor import train" in text]
    return script


@pytest.fixture
def script(tmp_path: Path) -> Path:
    text = documented_script()
    assert len(text.splitlines()) <= 10
    path = tmp_path / "train.py"
    # Tests start processes in the repository, users where their plan is.
    path.write_text(text.replace('"plan.json"', repr(str(tmp_path / "plan.json"))))
    return path


def plan(path: Path, ranks: int) -> None:
    cuts, devices = ([4], ["d0", "d1"]) if ranks == 2 else ([], ["d0"])
    scheduled(zoo_pipeline("gpt_tiny", cuts, devices, 3)).save(path / "plan.json")


def test_ten_lines_train_twice_under_torchrun_with_a_timeline(script: Path) -> None:
    plan(script.parent, 2)
    timeline = script.with_name("measured.json")
    text = script.read_text().replace("clip_norm=1.0", f"clip_norm=1.0, timeline={str(timeline)!r}")
    again = next(line for line in text.splitlines() if line.startswith("history"))
    script.write_text(text + again + "\nprint(history[-1].line())\n")
    done = torchrun(2, str(script))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "terminate" not in done.stderr
    # A line and its end are two writes of `print`, and the other rank's may come between them.
    lines = done.stdout.replace("\n", "").split("step ")
    assert lines[0] == ""
    assert len(lines) == 5
    # Both ranks print the same line of each training; the two trainings may print alike too.
    first, second, third, fourth = sorted(lines[1:])
    assert first == second
    assert third == fourth
    assert all(line.startswith("   4  loss ") for line in lines[1:])
    assert len(MeasuredTimeline.load(timeline).steps) == 4


def test_ten_lines_train_a_plan_of_one_rank_without_torchrun(script: Path) -> None:
    plan(script.parent, 1)
    done = subprocess.run(
        [warm_python(), str(script)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step    4  loss ")
    assert done.stderr == ""
