"""``pipeplan plan --runtime``: from the option to the files of the tool."""

import json
from pathlib import Path

import pytest
from commands import pipeplan
from solver.tiny_problems import renamed, tiny_problem

NAMES = ("embed", "layers.0", "layers.1", "norm", "loss")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The words of a command that plans a tiny problem."""
    tiny = tiny_problem(5, layers=len(NAMES), devices=2, microbatches=2, backward="any")
    problem = renamed(tiny, NAMES)
    problem.graph.save(tmp_path / "graph.json")
    (tmp_path / "cluster.json").write_text(problem.cluster.model_dump_json())
    (tmp_path / "job.json").write_text(problem.job.model_dump_json())
    files = ["graph.json", "--cluster", "cluster.json", "--job", "job.json"]
    options = ["--time-limit", "0.05", "--deterministic"]
    return [*(str(tmp_path / word) if ".json" in word else word for word in files), *options]


def test_a_plan_for_a_runtime_says_its_space_and_is_exported(
    words: list[str], tmp_path: Path
) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "out"
    planned = pipeplan("plan", *words, "--runtime", "deepspeed", "-o", plan)
    assert planned.exit_code == 0, planned.output
    assert "space of deepspeed: cuts at " in planned.output
    assert "in the order of 1F1B" in planned.output
    assert "the bound holds for every plan of this space; its proof allows" in planned.output
    assert json.loads(plan.read_text())["job"]["runtime"] == "deepspeed"
    assert pipeplan("export", plan, "--to", "deepspeed", "-o", folder).exit_code == 0
    verified = pipeplan("verify", plan).output
    assert verified.startswith(f"{plan}: holds; it lies in the space of its bound: cuts at ")


def test_an_unknown_runtime_is_refused_with_the_known_ones(words: list[str]) -> None:
    refused = pipeplan("plan", *words, "--runtime", "jax")
    assert refused.exit_code == 1
    known = "choose from pipeplan, torch, torchtitan, megatron, deepspeed"
    assert f"error: --runtime: 'jax' is unknown; {known}" in refused.output


def test_other_runtimes_reduce_in_every_iteration(words: list[str]) -> None:
    sync = ["--runtime", "megatron", "--sync", "semi_decentralized"]
    refused = pipeplan("plan", *words, *sync)
    assert refused.exit_code == 1
    assert "megatron reduces gradients over all pipelines in every iteration" in refused.output


def test_a_sweep_keeps_to_the_runtime(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    swept = pipeplan("sweep", *words, "--runtime", "torch", "-o", folder)
    assert swept.exit_code == 0, swept.output
    plans = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    assert [plan["job"]["replication"] for plan in plans if "stages" in plan] == [False]
