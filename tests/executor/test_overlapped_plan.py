"""A plan with replicas of uneven shares, split backwards and overlapped reductions, for real."""

from pathlib import Path

import pytest
from executor_plans import by_counts, pipeline_of, shuffled, traced
from launch import forked
from plain_torch import Alone, worst_error

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from models import ZOO
from planner.measured.timeline import MeasuredTimeline
from planner.plan.plan import Plan, Sync
from planner.prediction import with_strategy
from planner.simulation.simulator import simulate_plan
from planner.verification import verify

STEPS = 4
TRAINING = """
format = "pipeplan-train/1"
steps = 4
seed = 3
data = "random"
[checkpoint]
folder = "{folder}"
every = 99
"""


def overlapped_plan() -> Plan:
    """Five microbatches, 4 and 1 on the replicas of the first stage, some buckets a stage."""
    graph = traced("gpt_tiny", "float64")
    layers = list(graph.layers)
    rows = [(layers[:3], ["d0", "d1"]), (layers[3:], ["d2", "d0"])]
    fields = {"precision": "float64", "microbatches": 5, "learning_rate": 0.05}
    pipeline = pipeline_of(graph, ZOO["gpt_tiny"], rows, **fields)
    owners = {**by_counts(0, {"d0": 4, "d1": 1}), **by_counts(1, {"d2": 3, "d0": 2})}
    plan = shuffled(pipeline, 6, owners, split=0.5)
    return with_strategy(plan, Sync(options={"bucket_mib": 0.05}))


def test_the_plan_uses_all_of_them() -> None:
    plan = overlapped_plan()
    assert verify(plan) == []
    timeline = simulate_plan(plan)
    orders = " ".join(plan.orders.values())
    assert {kind for kind in "BIW" if kind in orders} == set("BIW")
    last_s = max(e.end_s for e in timeline.operations if e.operation.stage == 1)
    starts_s = [
        event.start_s for event in timeline.synchronisations if event.synchronisation.stages == (1,)
    ]
    assert len(starts_s) > 2
    assert starts_s[0] < last_s


@pytest.mark.extensive
def test_it_trains_what_one_process_does(tmp_path: Path) -> None:
    plan, measured = overlapped_plan(), tmp_path / "measured.json"
    plan.save(tmp_path / "plan.json")
    training = tmp_path / "train.toml"
    training.write_text(TRAINING.format(folder=tmp_path / "checkpoints"))
    options = ["--config", str(training), "--timeline", str(measured)]
    done = forked(3, "-m", "executor", str(tmp_path / "plan.json"), *options)
    assert done.returncode == 0, done.stderr[-4000:]
    alone = Alone(plan, TrainingConfig.load(training))
    alone.train(STEPS)
    checkpoint = Checkpoint.open(tmp_path / "checkpoints")
    names = checkpoint.names("parameters/")
    found = {n.removeprefix("parameters/"): x for n, x in checkpoint.read(names).items()}
    assert worst_error(found, alone.parameters()) < 1e-6
    # From the second step on a stage's first bucket sets off before its last backward has ended.
    timeline = MeasuredTimeline.load(measured)
    for row in (row for row in timeline.reductions if row.step > 1 and len(row.stages) == 1):
        ends = [
            e.end_s
            for e in timeline.operations
            if (e.step, e.device, e.what.stage) == (row.step, row.device, row.stages[0])
            and e.what.kind in "BW"
        ]
        assert row.start_s < max(ends)
