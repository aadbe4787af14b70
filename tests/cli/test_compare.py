"""``pipeplan compare``."""

import json
from pathlib import Path

import pytest
from commands import CLUSTERS, pipeplan

from planner import load_plan

JOB = """
format = "pipeplan-job/1"
microbatches = 4
samples_per_microbatch = 8
"""


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("compare")
    job, model = folder / "job.toml", folder / "graph.json"
    job.write_text(JOB)
    made = pipeplan("trace", "models.gpt:gpt_tiny", "--job", job, "-o", model)
    assert made.exit_code == 0, made.output
    return [
        model,
        "--cluster",
        CLUSTERS / "irregular.toml",
        "--job",
        job,
        "--time-limit",
        0.1,
        "--deterministic",
    ]


def test_compare_prints_a_table_and_writes_markdown(problem: list[object], tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    result = pipeplan("compare", *problem, "-o", path)
    assert result.exit_code == 0, result.output
    written = path.read_text()
    for name in ("pipeplan", "even", "even-replicated", "pipedream", "dapple", "autopipe", "spp"):
        assert name in result.stdout
        assert f"| {name} |" in written
        assert f"{name}: " in result.stderr
    assert "gap to" in result.stdout


def test_compare_prints_json_of_the_planners_asked_for(problem: list[object]) -> None:
    result = pipeplan("compare", *problem, "--planners", "spp, even", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["planner"] for row in rows] == ["pipeplan", "spp", "even"]
    for row in rows:
        assert row["iteration_time_s"] >= rows[0]["iteration_time_s"]
        assert row["ratio"] == pytest.approx(row["iteration_time_s"] / rows[0]["iteration_time_s"])
        assert 0 <= row["bubble"] <= 1
        assert row["peak_memory_bytes"] > 0
        assert row["stages"][0]["devices"]


def test_the_fastest_baselines_plan_is_written(problem: list[object], tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    result = pipeplan("compare", *problem, "--best-baseline", path, "--json")
    assert result.exit_code == 0, result.output
    _, *baselines = json.loads(result.stdout)
    best = min(baselines, key=lambda row: row["iteration_time_s"])
    plan = load_plan(path)
    assert plan.predicted.iteration_time_s == best["iteration_time_s"]
    assert [list(stage.devices) for stage in plan.stages] == [s["devices"] for s in best["stages"]]
    assert plan.provenance.solver == f"{best['planner']}, schedule by {best['schedule']}"
    assert f"wrote {path}: {best['planner']}, {best['schedule']}" in result.stderr
    assert pipeplan("verify", path).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planners", "spp,megaplan"], "'megaplan' is not known; choose from even,"),
        (["--planners", ","], "none named; choose from even,"),
        (["--time-limit", "0"], "--time-limit: 0"),
        (["-o", "no/such/folder/table.md"], "no/such/folder"),
        (["--best-baseline", "no/such/folder/plan.json"], "no/such/folder"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_read(
    options: list[str], message: str
) -> None:
    cluster = CLUSTERS / "irregular.toml"
    result = pipeplan("compare", "no_such_module:factory", "--cluster", cluster, *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "no_such_module" not in result.stderr


def test_compare_fails_where_no_planner_finds_a_plan(problem: list[object], tmp_path: Path) -> None:
    cluster = tmp_path / "tiny.toml"
    cluster.write_text(
        """
format = "pipeplan-cluster/1"
[[devices]]
name = "small"
type = "toy"
[device_types.toy]
memory_gib = 0.001
reserved_gib = 0
memory_bandwidth_gb_per_s = 1
peak_tflop_per_s = { float32 = 1 }
"""
    )
    options = [problem[0], "--cluster", cluster, *problem[3:]]
    result = pipeplan("compare", *options, "--planners", "spp")
    assert result.exit_code == 1
    assert "spp: none of" in " ".join(result.stdout.split())
    best = pipeplan("compare", *options, "--best-baseline", tmp_path / "none.json")
    assert best.exit_code == 1
    assert "no baseline has a plan that fits" in best.stderr
