"""Training files under torchrun: what a plan trains is what plain torch trains on one process."""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
from executor_plans import by_counts, cut_pipeline, scheduled, shuffled, traced, zoo_pipeline
from launch import forked
from plain_torch import Alone, worst_error
from run_files import RunFiles
from user_code import Bytes, decayed

from executor.checkpoint import Checkpoint
from executor.training.samples import DatasetBatches
from models import ZOO
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.trace import trace

STEPS = 4
RATE = """
learning_rate = {rate}
clip_norm = {clip}
[schedule]
kind = "{kind}"
warmup_steps = 2
final_factor = 0.1
"""
STEP = re.compile(
    r"step +(\d+)  loss +(\d+\.\d+)  +(\d+\.\d+) s \(predicted (\d+\.\d+) s\)  "
    r"bubble +(\d+)%  memory (\d+\.\d+) GiB  ([\d.,]+) samples/s  MFU (\d+\.\d+)%"
)


@dataclass(frozen=True)
class Case:
    """A plan and how it is trained."""

    plan: Callable[[], Plan]
    text: str
    run: dict[str, str] | None = None


def plan_of(name: str, precision: str = "float32", loss: str | None = None, **job: object) -> Plan:
    """Four microbatches through two replicas and a second stage."""
    graph = traced(name, precision) if loss is None else own_graph(name, loss)
    fields = {"microbatches": 4, "precision": precision, **job}
    if loss is not None:
        fields["loss"] = loss
    return scheduled(cut_pipeline(graph, ZOO[name], [3], ["d0 d1", "d2"], **fields))


@functools.cache
def own_graph(name: str, loss: str):
    return trace(ZOO[name], Job(samples_per_microbatch=2, loss=loss))


def chain(precision: str = "float32") -> Plan:
    """Three stages, without replicas and tied weights: sums have plain torch's order and type."""
    fields: dict[str, object] = {"precision": precision}
    if precision.endswith("16"):
        fields["gradient_precision"] = "weights"
    return scheduled(zoo_pipeline("llama_tiny", [2, 4], ["d0", "d1", "d2"], 4, **fields))


CASES = {
    "adamw_float64": Case(
        lambda: plan_of("gpt_tiny", "float64", optimizer="adamw"),
        RATE.format(rate=0.003, clip=0.5, kind="cosine")
        + "[optimizer_arguments]\nweight_decay = 0.1\nbetas = [0.9, 0.95]\n",
    ),
    "momentum": Case(
        lambda: plan_of("llama_tiny"),
        RATE.format(rate=0.05, clip=0.2, kind="linear")
        + "[optimizer_arguments]\nweight_decay = 0.01\nnesterov = true\n",
    ),
    "bfloat16": Case(lambda: chain("bfloat16"), "clip_norm = 1.0\n"),
    "bfloat16_replicas": Case(lambda: plan_of("gpt_tiny", "bfloat16"), ""),
    "float16": Case(lambda: chain("float16"), "[loss_scale]\ninitial = 4096.0\n"),
    "float16_overflow": Case(
        lambda: plan_of("gpt_tiny", "float16"), "[loss_scale]\ninitial = 1048576.0\n"
    ),
    "autocast": Case(chain, 'autocast = "bfloat16"\n'),
    "own_code": Case(
        lambda: plan_of("gpt_tiny", loss="user_code:smoothed"),
        'optimizer = "user_code:decayed"\nlearning_rate = 0.01\n'
        '[data_arguments]\nsize = 29\n[schedule]\nkind = "user_code:halving"\n',
        {"loss": "user_code:smoothed", "data": "user_code:Bytes"},
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), STEPS)
    for name, case in CASES.items():
        found.add(name, case.plan(), case.text, **(case.run or {}))
    found.launch(3)
    return found


@pytest.mark.extensive
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("adamw_float64", 1e-10),
        ("momentum", 1e-6),
        ("bfloat16", 0.0),
        ("float16", 0.0),
        ("autocast", 0.0),
    ],
)
def test_parameters_are_those_of_plain_torch(runs: RunFiles, name: str, tolerance: float) -> None:
    alone = Alone(CASES[name].plan(), runs.config(name))
    if name == "float16":
        alone.scale = 4096.0
    losses = alone.train(STEPS)
    error = worst_error(runs.parameters(name), alone.parameters())
    print(f"{name}: {error:.2g}, losses {losses} {runs.losses(name)}")
    assert error <= tolerance
    assert runs.losses(name) == pytest.approx(losses, rel=max(tolerance, 1e-12))


@pytest.mark.extensive
def test_replicas_in_bfloat16_differ_by_the_rounding_of_their_sums(runs: RunFiles) -> None:
    plan, config = CASES["bfloat16_replicas"].plan(), runs.config("bfloat16_replicas")
    alone = Alone(plan, config)
    losses = alone.train(STEPS)
    assert runs.losses("bfloat16_replicas") == pytest.approx(losses, rel=0.01)
    assert worst_error(runs.parameters("bfloat16_replicas"), alone.parameters()) < 0.01


@pytest.mark.extensive
def test_an_overflow_skips_the_step_everywhere_and_lowers_the_scale(runs: RunFiles) -> None:
    history = runs.history("float16_overflow")
    skipped = [metrics["skipped"] for metrics in history]
    assert skipped[0]
    assert not skipped[-1]
    count = sum(skipped)
    facts = Checkpoint.open(runs.checkpoints("float16_overflow")).facts
    assert facts["loss_scale"]["scale"] == 2.0 ** (20 - count)
    plan, config = CASES["float16_overflow"].plan(), runs.config("float16_overflow")
    alone = Alone(plan, config)
    alone.scale = facts["loss_scale"]["scale"]
    for step in range(count + 1, STEPS + 1):
        alone.step(step)
    assert worst_error(runs.parameters("float16_overflow"), alone.parameters()) < 0.01


@pytest.mark.extensive
def test_data_loss_optimizer_and_schedule_of_the_users_own(runs: RunFiles) -> None:
    plan, config = CASES["own_code"].plan(), runs.config("own_code")
    example = example_batch(import_factory(ZOO["gpt_tiny"])(), plan.job)
    batch_of = DatasetBatches(Bytes(29), example, plan.microbatches, config.seed)
    alone = Alone(
        plan,
        config,
        loss="user_code:smoothed",
        batch_of=batch_of,
        optimizer=lambda named: decayed(list(named.items()), lr=0.01),
    )
    losses = alone.train(STEPS)
    assert runs.losses("own_code") == pytest.approx(losses, rel=1e-6)
    assert worst_error(runs.parameters("own_code"), alone.parameters()) < 1e-5


# --- the command ----------------------------------------------------------------------------------


def uneven_plan() -> Plan:
    """Replicas with one and three microbatches; one device holds the first and the last stage."""
    stages = ["d0", "d1 d2", "d0"]
    fields = {"optimizer": "adamw", "learning_rate": 3e-3}
    pipeline = zoo_pipeline("gpt_tiny", [3, 6], stages, 4, **fields)
    owners = {(stage, m): "d0" for stage in (0, 2) for m in range(4)}
    return shuffled(pipeline, 1, {**owners, **by_counts(1, {"d1": 1, "d2": 3})})


def test_training_by_a_plan_brings_the_loss_down(tmp_path: Path) -> None:
    uneven_plan().save(tmp_path / "plan.json")
    done = forked(3, "-m", "executor", str(tmp_path / "plan.json"), "--steps", "12")
    assert done.returncode == 0, done.stderr[-4000:]
    compared, *lines, last = done.stdout.splitlines()
    assert compared.startswith("compared with eager autograd: loss, gradients and buffers")
    rows = [STEP.fullmatch(line) for line in lines]
    assert all(rows), lines
    assert [int(row[1]) for row in rows] == list(range(1, 13))
    losses = [float(row[2]) for row in rows]
    vocabulary = 256
    assert abs(losses[0] / math.log(vocabulary) - 1) < 0.05
    assert mean(losses[-3:]) < 0.9 * mean(losses[:3])
    assert all(0 <= int(row[5]) <= 100 for row in rows)
    assert last == f"trained 12 steps on 3 ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}"
