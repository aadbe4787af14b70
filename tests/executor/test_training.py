"""``torchrun -m executor`` trains: the loss of a byte-level model of real text goes down."""

import math
import re
from pathlib import Path
from statistics import mean

from executor_plans import DEVICES, by_counts, shuffled, zoo_pipeline
from launch import torchrun

from planner.artifacts.plan import Plan

STEP = re.compile(
    r"step +(\d+)  loss +(\d+\.\d+)  +(\d+\.\d+) s \(predicted (\d+\.\d+) s\)  "
    r"bubble +(\d+)%  process (\d+\.\d+) GiB"
)
STEPS = 12


def uneven_plan() -> Plan:
    """Replicas with one and four microbatches; one device holds the first and the last stage."""
    stages = ["d0", "d1 d2", "d3", "d0"]
    fields = {"optimizer": "adamw", "learning_rate": 3e-3}
    pipeline = zoo_pipeline("gpt_tiny", [3, 5, 7], stages, 5, **fields)
    owners = {(stage, m): on for stage, on in ((0, "d0"), (2, "d3"), (3, "d0")) for m in range(5)}
    return shuffled(pipeline, 1, {**owners, **by_counts(1, {"d1": 1, "d2": 4})})


def test_training_by_a_plan_brings_the_loss_down(tmp_path: Path) -> None:
    plan = uneven_plan()
    assert plan.ranks == DEVICES
    plan.save(tmp_path / "plan.json")
    options = ["--steps", str(STEPS), "--data", "text"]
    done = torchrun(4, "-m", "executor", str(tmp_path / "plan.json"), *options)
    assert done.returncode == 0, done.stderr[-4000:]
    *lines, last = done.stdout.splitlines()
    rows = [STEP.fullmatch(line) for line in lines]
    assert all(rows), lines
    assert [int(row[1]) for row in rows] == list(range(1, STEPS + 1))
    losses = [float(row[2]) for row in rows]
    vocabulary = 256
    assert abs(losses[0] / math.log(vocabulary) - 1) < 0.05
    assert mean(losses[-3:]) < 0.9 * mean(losses[:3])
    assert all(0 <= int(row[5]) <= 100 for row in rows)
    assert last == f"trained {STEPS} steps on 4 ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}"
