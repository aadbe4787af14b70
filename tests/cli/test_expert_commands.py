"""Commands on plans whose groups have whole experts."""

import json
from pathlib import Path

import pytest
from commands import CLUSTERS, pipeplan

from planner import Plan
from planner.model.layer_graph import LayerGraph

MODEL, CLUSTER = "models.mixtral:mixtral_tiny", CLUSTERS / "irregular.toml"
OPTIONS = ("--cluster", CLUSTER, "--deterministic", "--time-limit", 0.2)
ANY, TWO = ("--set", "tensor_parallel=any"), ("--set", "tensor_parallel=2")
WHOLE = ("--set", "expert_parallel=true")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "job.toml"
    path.write_text(
        'format = "pipeplan-job/1"\nsamples_per_microbatch = 2\ntensor_parallel = 2\n'
        "sequence_parallel = true\nexpert_parallel = true\nexpert_load = [4, 2, 1, 1]\n"
    )
    return path


def test_a_job_with_loads_is_planned_verified_and_explained(job: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = pipeplan("plan", MODEL, "--job", job, *OPTIONS, "-o", path)
    assert result.exit_code == 0
    # Two experts of four have six of eight tokens.
    assert "the one with the most tokens has up to 1.50 times the mean" in result.output
    plan = Plan.load(path)
    assert plan.job.expert_loads == ((4.0, 2.0, 1.0, 1.0),)
    (split,) = plan.model.graph.splits
    assert (split.experts, split.expert_load) == (True, plan.job.expert_loads)
    for command in (("verify", path, "--prove"), ("explain", path), ("simulate", path)):
        assert pipeplan(*command).exit_code == 0
    changed = json.loads(path.read_text())
    changed["job"]["expert_load"] = [1, 1, 1, 1]
    path.write_text(json.dumps(changed))
    result = pipeplan("verify", path)
    assert result.exit_code == 1
    assert "expert_load = [1.0, 1.0, 1.0, 1.0]: " in result.output
    assert "2 is for ((4.0, 2.0, 1.0, 1.0),)" in " ".join(result.output.split())


def test_the_option_and_any_size_that_divides_the_experts(tmp_path: Path) -> None:
    path, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    options = (
        "--set",
        "experts=6",
        "--set",
        "tensor_parallel=any",
        "--set",
        "expert_parallel=true",
    )
    assert pipeplan("plan", MODEL, *OPTIONS, *options, "-o", path).exit_code == 0
    # Of 2, 4 and 8 devices the first alone divides six experts.
    assert [split.degree for split in Plan.load(path).model.graph.splits] == [2]
    result = pipeplan("trace", MODEL, "--split", 2, "--experts", "-o", graph)
    assert result.exit_code == 0
    assert "whole experts" in result.output
    assert LayerGraph.load(graph).record.splits[0].experts
    result = pipeplan("plan", graph, *OPTIONS, "--set", "tensor_parallel=2")
    assert result.exit_code == 1
    assert "expert_parallel = false: the layer graph's split over groups of 2" in result.output


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (
            MODEL,
            ("--set", "tensor_parallel=3"),
            "3: does not divide the 4 experts of layer 'layers.0'",
        ),
        (MODEL, (), "set tensor_parallel to their number or"),
        (
            "models.gpt:gpt_tiny",
            ("--set", "tensor_parallel=2"),
            "the model sends no tokens to experts",
        ),
        (
            MODEL,
            ("--set", "tensor_parallel=any", "--set", "experts=5"),
            "divides the 5 experts of a layer",
        ),
    ],
)
def test_what_cannot_be_given_out_is_named(
    model: str, options: tuple[object, ...], told: str
) -> None:
    result = pipeplan("plan", model, *OPTIONS, *options, "--set", "expert_parallel=true")
    assert result.exit_code == 1
    assert told in " ".join(result.output.split())


def test_experts_without_a_split_are_refused() -> None:
    result = pipeplan("trace", MODEL, "--experts")
    assert result.exit_code == 1
    assert "--experts is part of a split; add --split DEGREE" in result.output
